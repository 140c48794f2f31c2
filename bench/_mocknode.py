"""An execution node that serves a provable chain in a process of its own: what is measured beside it is the reader.

Logs of the watched topics are rendered before the first request; headers, receipts and other logs fill templates.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import _mockchain as mockchain
import msgspec
from _receiver import Receiver

from vaultevents.core.logs import TOPICS

RANGE_LIMIT = 10_000
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_TAGS = ("latest", "safe", "finalized")
_REFUSED_TOPICS = b'"error":{"code":-32602,"message":"topics: a list of the first topic is all that is known here"}'


class _Settings:
    """What a client may change: how long answers wait. `counted` has requests and calls since they were asked for."""

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.counted = [0, 0]


class _Node(Receiver):
    """One connection."""

    def __init__(self, chain: mockchain.Chain, settings: _Settings) -> None:
        self._chain, self._settings = chain, settings

    def answer(self, request: bytes) -> None:
        answer = self._answer(msgspec.json.decode(request[request.index(b"\r\n\r\n") + 4 :]))
        if self._settings.latency_s:
            asyncio.get_running_loop().call_later(self._settings.latency_s, self._send, answer)
        else:
            self._send(answer)

    def _send(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.writelines([_HEAD % len(answer), answer])

    def _answer(self, sent: Any) -> bytes:
        calls = sent if isinstance(sent, list) else [sent]
        settings = self._settings
        match calls[0]["method"], calls[0]["params"]:
            case "mock_counted", _:
                counted, settings.counted = settings.counted, [0, 0]
                return b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (calls[0]["id"], json.dumps(counted).encode())
            case "mock_latency", [latency_ms]:
                settings.latency_s = latency_ms / 1000
                return b'{"jsonrpc":"2.0","id":%d,"result":null}' % calls[0]["id"]
        settings.counted[0] += 1
        settings.counted[1] += len(calls)
        answers = [
            b'{"jsonrpc":"2.0","id":%d,%b}' % (call["id"], self._result(call["method"], call["params"]))
            for call in calls
        ]
        return b"[%b]" % b",".join(answers) if isinstance(sent, list) else answers[0]

    def _result(self, method: str, params: list[Any]) -> bytes:
        chain = self._chain
        match method, params:
            case "eth_chainId", _:
                return b'"result":"%b"' % hex(mockchain.CHAIN_ID).encode()
            case (("eth_getBlockByNumber" | "eth_getBlockByHash"), [str(position), *rest]):
                number = self._number(position)
                if number is None:
                    return b'"result":null'
                return b'"result":' + mockchain.header_json(chain, number, full=rest[:1] == [True])
            case "eth_getBlockReceipts", [str(position)]:
                number = self._number(position)
                if number is None:
                    return b'"result":null'
                return b'"result":[%b]' % b",".join(mockchain.receipts_json(chain, number))
            case "eth_getTransactionReceipt", [str(tx_hash)]:
                place = chain.transactions.get(bytes.fromhex(tx_hash[2:]))
                if place is None:
                    return b'"result":null'
                return b'"result":' + mockchain.receipts_json(chain, place[0])[place[1]]
            case "eth_getLogs", [dict(wanted)]:
                return self._logs(wanted)
            case _:
                return b'"error":{"code":-32601,"message":"the method does not exist"}'

    def _number(self, position: str) -> int | None:
        """The height of a tag, a quantity or a hash; None where there is no such block."""
        if position in _TAGS:
            return self._chain.last
        if len(position) == 66:
            return self._chain.numbers.get(bytes.fromhex(position[2:]))
        number = int(position, 16)
        return number if number <= self._chain.last else None

    def _logs(self, wanted: dict[str, Any]) -> bytes:
        topics = wanted.get("topics") or []
        if len(topics) > 1:
            return _REFUSED_TOPICS
        first_topics = [topics[0]] if topics and isinstance(topics[0], str) else topics[0] if topics else None
        kinds = None if first_topics is None else {bytes.fromhex(topic[2:]) for topic in first_topics}
        if "blockHash" in wanted:
            number = self._number(wanted["blockHash"])
            if number is None:
                return b'"error":{"code":-32000,"message":"unknown block"}'
            begin = end = number
        else:
            begin, end = int(wanted["fromBlock"], 16), int(wanted["toBlock"], 16)
        if end - begin + 1 > RANGE_LIMIT:
            return b'"error":{"code":-32602,"message":"range exceeds limit of %d"}' % RANGE_LIMIT
        found = (
            self._watched(begin, end) if kinds is not None and kinds >= set(TOPICS) else self._all(begin, end, kinds)
        )
        if "address" in wanted:
            given = wanted["address"]
            asked = {mockchain.address_prefix(one) for one in ([given] if isinstance(given, str) else given)}
            found = [log for log in found if log[: mockchain.ADDRESS_END] in asked]
        return b'"result":[%b]' % b",".join(found)

    def _watched(self, begin: int, end: int) -> Sequence[bytes]:
        places = self._chain.places
        return self._chain.logs[bisect_left(places, begin) : bisect_right(places, end)]

    def _all(self, begin: int, end: int, kinds: set[bytes] | None) -> list[bytes]:
        """The logs of all topics, or of some `kinds`, from the blocks that have any."""
        chain = self._chain
        numbers = sorted({*chain.places[bisect_left(chain.places, begin) : bisect_right(chain.places, end)]})
        found = [log for number in numbers for log in mockchain.logs_json(chain, chain.block(number))]
        return found if kinds is None else [log for log in found if mockchain.first_topic(log) in kinds]


@contextmanager
def mock_node(blocks: int, logs: int, vaults: int) -> Iterator[str]:
    """A running node; its URL."""
    numbers = map(str, (blocks, logs, vaults))
    process = subprocess.Popen([sys.executable, __file__, *numbers], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    try:
        yield process.stdout.readline().decode().strip()
    finally:
        process.stdin.close()
        process.wait()


async def _serve(chain: mockchain.Chain) -> None:
    settings = _Settings()
    server = await asyncio.get_running_loop().create_server(lambda: _Node(chain, settings), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)  # the parent closes it
    await ended.wait()


def _main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("blocks", "logs", "vaults"):
        parser.add_argument(name, type=int)
    options = parser.parse_args(arguments)
    gc.disable()  # the chain makes no circles, and walking through millions of objects takes longer than making them
    chain = mockchain.build(options.blocks, options.logs, options.vaults)
    gc.freeze()
    gc.enable()
    asyncio.run(_serve(chain))


if __name__ == "__main__":
    _main(sys.argv[1:])
