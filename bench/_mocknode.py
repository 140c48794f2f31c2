"""An execution node that serves precomputed bytes, in a process of its own: what is measured beside it is the reader.

Its chain is made of numbers alone: block n has the hash `block_hash(n)`, and a log stands in a random block. Headers of
blocks with logs and all logs are rendered before the first request; other headers are filled into a template.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from _receiver import Receiver

from vaultevents.core.logs import ETHER_FUNDED, WITHDRAWAL_CLAIMED
from vaultevents.devnet.header import bloom_bits

CHAIN_ID = 31337
GENESIS_S = 1_700_000_000
RANGE_LIMIT = 10_000
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_OTHERS = 2
"""Transactions of each block before those with logs."""


def vault(number: int) -> bytes:
    return hashlib.sha256(b"vault %d" % number).digest()[:20]


def queue(number: int) -> bytes:
    return hashlib.sha256(b"queue %d" % number).digest()[:20]


def block_hash(number: int) -> str:
    return "0x" + hashlib.sha256(b"block %d" % number).hexdigest()


def time_s(number: int) -> int:
    return GENESIS_S + 12 * number


@dataclass(frozen=True, slots=True)
class _Chain:
    """`places` has the block of each log; `headers` and `numbers` (by hash) are of blocks with logs."""

    blocks: int
    places: list[int]
    logs: list[bytes]
    headers: dict[int, bytes]
    numbers: dict[str, int]


def _chain(blocks: int, logs: int, vaults: int) -> _Chain:
    rng = random.Random(f"{blocks}/{logs}")
    places = sorted(rng.randint(1, blocks) for _ in range(logs))
    rendered, headers = [], {}
    number, index, bloom, hashes = 0, 0, 0, _others(0)
    for at, place in enumerate(places):
        if place != number:
            if number:
                headers[number] = _header(number, bloom, hashes)
            number, index, bloom, hashes = place, 0, 0, _others(place)
        tx_hash = "0x" + hashlib.sha256(b"transaction %d" % at).hexdigest()
        owner = rng.randrange(vaults)
        if rng.random() < 0.85:
            address, topics = vault(owner), [bytes(ETHER_FUNDED)]
        else:
            people = [bytes(12) + vault(at), bytes(12) + queue(at)]
            address, topics = queue(owner), [bytes(WITHDRAWAL_CLAIMED), at.to_bytes(32), *people]
        for value in (address, *topics):
            bloom |= bloom_bits(value)
        log = {
            "address": "0x" + address.hex(),
            "topics": ["0x" + topic.hex() for topic in topics],
            "data": "0x" + rng.randrange(10**15, 10**20).to_bytes(32).hex(),
            "blockNumber": hex(number),
            "transactionHash": tx_hash,
            "transactionIndex": hex(len(hashes)),
            "blockHash": block_hash(number),
            "logIndex": hex(index),
            "removed": False,
        }
        rendered.append(json.dumps(log, separators=(",", ":")).encode())
        hashes.append(tx_hash)
        index += 1
    if number:
        headers[number] = _header(number, bloom, hashes)
    return _Chain(blocks, places, rendered, headers, {block_hash(number): number for number in headers})


def _others(number: int) -> list[str]:
    return ["0x" + hashlib.sha256(b"other %d/%d" % (number, at)).hexdigest() for at in range(_OTHERS)]


def _header(number: int, bloom: int, hashes: list[str]) -> bytes:
    zero = "0x" + 32 * "00"
    header = {
        "number": hex(number),
        "hash": block_hash(number),
        "parentHash": block_hash(number - 1),
        "timestamp": hex(time_s(number)),
        "logsBloom": "0x" + bloom.to_bytes(256).hex(),
        "sha3Uncles": zero,
        "stateRoot": zero,
        "transactionsRoot": zero,
        "receiptsRoot": zero,
        "miner": "0x" + 20 * "00",
        "gasLimit": "0x2255100",
        "gasUsed": "0x5208",
        "extraData": "0x",
        "mixHash": zero,
        "nonce": "0x0000000000000000",
        "baseFeePerGas": "0x7",
        "withdrawalsRoot": zero,
        "size": "0x3e8",
        "uncles": [],
        "withdrawals": [],
        "transactions": hashes,
    }
    return json.dumps(header, separators=(",", ":")).encode()


class _Node(Receiver):
    """One connection. `counted` has the HTTP requests and the calls since they were last asked for."""

    def __init__(self, chain: _Chain, latency_s: float, counted: list[int]) -> None:
        self._chain, self._latency_s, self._counted = chain, latency_s, counted

    def answer(self, request: bytes) -> None:
        answer = self._answer(msgspec.json.decode(request[request.index(b"\r\n\r\n") + 4 :]))
        if self._latency_s:
            asyncio.get_running_loop().call_later(self._latency_s, self._send, answer)
        else:
            self._send(answer)

    def _send(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.writelines([_HEAD % len(answer), answer])

    def _answer(self, sent: Any) -> bytes:
        calls = sent if isinstance(sent, list) else [sent]
        if calls[0]["method"] == "mock_counted":
            counted, self._counted[:] = list(self._counted), [0, 0]
            return b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (calls[0]["id"], json.dumps(counted).encode())
        self._counted[0] += 1
        self._counted[1] += len(calls)
        answers = [
            b'{"jsonrpc":"2.0","id":%d,%b}' % (call["id"], self._result(call["method"], call["params"]))
            for call in calls
        ]
        return b"[%b]" % b",".join(answers) if isinstance(sent, list) else answers[0]

    def _result(self, method: str, params: list[object]) -> bytes:
        chain = self._chain
        match method, params:
            case "eth_chainId", _:
                return b'"result":"%b"' % hex(CHAIN_ID).encode()
            case "eth_getBlockByNumber", [str(position), *_]:
                number = chain.blocks if position in ("latest", "safe", "finalized") else int(position, 16)
                return b'"result":' + (chain.headers.get(number) or _header(number, 0, _others(number)))
            case "eth_getLogs", [{"fromBlock": str(first), "toBlock": str(last)}]:
                begin, end = int(first, 16), int(last, 16)
                if end - begin + 1 > RANGE_LIMIT:
                    return b'"error":{"code":-32602,"message":"range exceeds limit of %d"}' % RANGE_LIMIT
                found = chain.logs[bisect_left(chain.places, begin) : bisect_right(chain.places, end)]
                return b'"result":[%b]' % b",".join(found)
            case "eth_getLogs", [{"blockHash": str(asked)}]:  # every log of this chain has one of the watched topics
                number = chain.numbers.get(asked, 0)
                found = chain.logs[bisect_left(chain.places, number) : bisect_right(chain.places, number)]
                return b'"result":[%b]' % b",".join(found)
            case _:
                return b'"error":{"code":-32601,"message":"the method does not exist"}'


@contextmanager
def mock_node(blocks: int, logs: int, vaults: int, latency_ms: float) -> Iterator[str]:
    """A running node; its URL."""
    numbers = map(str, (blocks, logs, vaults, latency_ms))
    process = subprocess.Popen([sys.executable, __file__, *numbers], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    try:
        yield process.stdout.readline().decode().strip()
    finally:
        process.stdin.close()
        process.wait()


async def _serve(chain: _Chain, latency_s: float) -> None:
    counted = [0, 0]
    server = await asyncio.get_running_loop().create_server(lambda: _Node(chain, latency_s, counted), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)  # the parent closes it
    await ended.wait()


def _main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("blocks", int), ("logs", int), ("vaults", int), ("latency_ms", float)):
        parser.add_argument(name, type=kind)
    options = parser.parse_args(arguments)
    asyncio.run(_serve(_chain(options.blocks, options.logs, options.vaults), options.latency_ms / 1000))


if __name__ == "__main__":
    _main(sys.argv[1:])
