"""Two bare loops beside the backfill: they fetch, decode and copy the same rows, and could not go on after a crash.

`plain` reads logs, and headers of the blocks with logs of registered contracts, and proves nothing. `proving` reads
the receipts and transactions of these blocks, too: it takes the logs from the receipts and computes header hashes and
both roots.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import aiohttp
import msgspec
import rlp
from _mockchain import queue, vault
from _mocknode import RANGE_LIMIT

from vaultevents.core.events import ENCODING
from vaultevents.core.keccak import keccak
from vaultevents.core.logs import ETHER_FUNDED, TOPICS
from vaultevents.core.units import Wei, checksum, eth_text, hex_text
from vaultevents.store.pool import Database

CONNECTIONS = 8  # as many requests as a backfill has under way
BLOCKS_AT_ONCE = 100

_TOPIC_TEXTS = frozenset(map(hex_text, TOPICS))
_HASHED = (
    *("parentHash", "sha3Uncles", "miner", "stateRoot", "transactionsRoot", "receiptsRoot", "logsBloom", "difficulty"),
    *("number", "gasLimit", "gasUsed", "timestamp", "extraData", "mixHash", "nonce", "baseFeePerGas"),
    *("withdrawalsRoot", "blobGasUsed", "excessBlobGas", "parentBeaconBlockRoot", "requestsHash"),
)
_NUMBERS = frozenset(
    ("difficulty", "number", "gasLimit", "gasUsed", "timestamp", "baseFeePerGas", "blobGasUsed", "excessBlobGas")
)


class _Log(msgspec.Struct, rename="camel"):
    address: str
    topics: list[str]
    data: str
    block_number: str
    transaction_hash: str
    log_index: str


class _Header(msgspec.Struct):
    number: str
    timestamp: str


class _Receipt(msgspec.Struct, rename="camel"):
    type: str
    status: str
    cumulative_gas_used: str
    logs_bloom: str
    logs: list[_Log]


class _Answer(msgspec.Struct):
    id: int
    result: msgspec.Raw


_ANSWERS = msgspec.json.Decoder(list[_Answer])
_LOGS = msgspec.json.Decoder(list[_Log])
_HEADER = msgspec.json.Decoder(_Header)
_FIELDS = msgspec.json.Decoder(dict[str, Any])
_RECEIPTS = msgspec.json.Decoder(list[_Receipt])

_Ask = Callable[[list[tuple[str, list[Any]]]], Awaitable[list[msgspec.Raw]]]
_Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """`owners` has the vault of each registered address, in lower-case hexadecimal digits."""

    database: Database
    url: str
    blocks: int
    webhooks: int
    owners: dict[str, str]

    @classmethod
    def of(cls, database: Database, url: str, blocks: int, vaults: int, webhooks: int) -> Task:
        owners = {hex_text(address(at)): f"v{at}" for at in range(vaults) for address in (vault, queue)}
        return cls(database, url, blocks, webhooks, owners)


async def plain(task: Task) -> float:
    """Seconds of the loop that proves nothing."""
    return await _loop(task, _read_plain)


async def proving(task: Task) -> float:
    """Seconds of the loop that proves that each log is on the chain."""
    return await _loop(task, _read_proving)


async def _loop(task: Task, read: Callable[[_Ask, Task, list[_Log]], Awaitable[list[tuple[_Log, int]]]]) -> float:
    seq = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS)) as session:

        async def ask(calls: list[tuple[str, list[Any]]]) -> list[msgspec.Raw]:
            sent = [{"jsonrpc": "2.0", "id": at, "method": m, "params": p} for at, (m, p) in enumerate(calls)]
            async with session.post(task.url, data=msgspec.json.encode(sent)) as response:
                return [answer.result for answer in _ANSWERS.decode(await response.read())]

        begin = time.perf_counter()
        for first in range(1, task.blocks + 1, RANGE_LIMIT):
            span = {"fromBlock": hex(first), "toBlock": hex(min(first + RANGE_LIMIT - 1, task.blocks))}
            (found,) = await ask([("eth_getLogs", [span | {"topics": [sorted(_TOPIC_TEXTS)]}])])
            timed = await read(ask, task, [log for log in _LOGS.decode(found) if log.address in task.owners])
            rows = [_row(seq + at, log, time_s, task.owners) for at, (log, time_s) in enumerate(timed, 1)]
            await _copy(task, rows, seq)
            seq += len(rows)
        return time.perf_counter() - begin


async def _read_plain(ask: _Ask, task: Task, logs: list[_Log]) -> list[tuple[_Log, int]]:
    """The logs with the times of their blocks."""
    numbers = list(dict.fromkeys(log.block_number for log in logs))
    answers = await asyncio.gather(
        *(ask([("eth_getBlockByNumber", [number, False]) for number in chunk]) for chunk in _chunks(numbers))
    )
    times = {header.number: int(header.timestamp, 16) for header in map(_HEADER.decode, chain.from_iterable(answers))}
    return [(log, times[log.block_number]) for log in logs]


async def _read_proving(ask: _Ask, task: Task, logs: list[_Log]) -> list[tuple[_Log, int]]:
    """The same logs from the receipts of their blocks."""
    numbers = list(dict.fromkeys(log.block_number for log in logs))
    chunks = await asyncio.gather(*(_prove(ask, task, chunk) for chunk in _chunks(numbers)))
    return list(chain.from_iterable(chunks))


async def _prove(ask: _Ask, task: Task, numbers: Sequence[str]) -> list[tuple[_Log, int]]:
    headers, receipts = await asyncio.gather(
        ask([("eth_getBlockByNumber", [number, True]) for number in numbers]),
        ask([("eth_getBlockReceipts", [number]) for number in numbers]),
    )
    proven = []
    for header_answer, receipts_answer in zip(headers, receipts, strict=True):
        header, of_block = _FIELDS.decode(header_answer), _RECEIPTS.decode(receipts_answer)
        if header_hash(header) != bytes.fromhex(header["hash"][2:]):
            raise SystemExit(f"block {header['number']} has another hash")
        if root([encoded(receipt) for receipt in of_block]) != bytes.fromhex(header["receiptsRoot"][2:]):
            raise SystemExit(f"block {header['number']} has another receipts root")
        if root([encoded_transaction(sent) for sent in header["transactions"]]) != bytes.fromhex(
            header["transactionsRoot"][2:]
        ):
            raise SystemExit(f"block {header['number']} has another transactions root")
        time_s = int(header["timestamp"], 16)
        proven += [
            (log, time_s)
            for receipt in of_block
            for log in receipt.logs
            if log.address in task.owners and log.topics[0] in _TOPIC_TEXTS
        ]
    return proven


def header_hash(header: dict[str, Any]) -> bytes:
    """Keccak of the RLP of all fields."""
    items = [int(header[name], 16) if name in _NUMBERS else bytes.fromhex(header[name][2:]) for name in _HASHED]
    return keccak(rlp.encode(items))


def encoded(receipt: _Receipt) -> bytes:
    """The receipt of a typed transaction as it is hashed (EIP-2718)."""
    logs = [
        [
            bytes.fromhex(log.address[2:]),
            [bytes.fromhex(topic[2:]) for topic in log.topics],
            bytes.fromhex(log.data[2:]),
        ]
        for log in receipt.logs
    ]
    outcome, gas = int(receipt.status, 16), int(receipt.cumulative_gas_used, 16)
    payload = rlp.encode([outcome, gas, bytes.fromhex(receipt.logs_bloom[2:]), logs])
    return bytes([int(receipt.type, 16)]) + bytes(payload)


def encoded_transaction(sent: dict[str, Any]) -> bytes:
    """An EIP-1559 transaction as it is hashed."""
    fields = [
        *(int(sent[name], 16) for name in ("chainId", "nonce", "maxPriorityFeePerGas", "maxFeePerGas", "gas")),
        *(bytes.fromhex(sent["to"][2:]), int(sent["value"], 16), bytes.fromhex(sent["input"][2:])),
        [
            [bytes.fromhex(e["address"][2:]), [bytes.fromhex(k[2:]) for k in e["storageKeys"]]]
            for e in sent["accessList"]
        ],
        *(int(sent[name], 16) for name in ("yParity", "r", "s")),
    ]
    return b"\x02" + bytes(rlp.encode(fields))


def root(values: Sequence[bytes]) -> bytes:
    """The root of the trie of `values` by their positions (Yellow Paper, appendix D)."""
    return keccak(rlp.encode(_node([(rlp.encode(at).hex(), value) for at, value in enumerate(values)])))


def _node(entries: list[tuple[str, bytes]]) -> list[Any]:
    first, value = entries[0]
    if len(entries) == 1:
        return [_path(first, 2), value]
    least, most = min(entries)[0], max(entries)[0]
    shared = next(at for at in range(len(least)) if least[at] != most[at])
    if shared:
        return [_path(first[:shared], 0), _reference([(key[shared:], value) for key, value in entries])]
    below = [[(key[1:], value) for key, value in entries if key[0] == digit] for digit in "0123456789abcdef"]
    return [*(_reference(child) if child else b"" for child in below), b""]


def _reference(entries: list[tuple[str, bytes]]) -> Any:
    node = _node(entries)
    text = rlp.encode(node)
    return node if len(text) < 32 else keccak(text)


def _path(digits: str, kind: int) -> bytes:
    odd = len(digits) % 2
    return bytes.fromhex(f"{kind + odd}{'' if odd else '0'}{digits}")


def _chunks(numbers: Sequence[str]) -> Iterable[Sequence[str]]:
    return (numbers[at : at + BLOCKS_AT_ONCE] for at in range(0, len(numbers), BLOCKS_AT_ONCE))


def _row(seq: int, log: _Log, time_s: int, owners: dict[str, str]) -> _Row:
    address = checksum(bytes.fromhex(log.address[2:]))
    owner, amount, tx_hash = owners[log.address], Wei(int(log.data, 16)), log.transaction_hash
    payload: dict[str, Any]
    if log.topics[0] == hex_text(ETHER_FUNDED):
        kind, suffix, title = "funding_received", tx_hash.upper(), "Funding received"
        payload = {"tx_hash": tx_hash, "amount_wei": str(amount), "staking_vault_address": address}
        message = f"Vault {owner} received {eth_text(amount)} ETH."
    else:
        request = str(int(log.topics[1], 16))
        kind, suffix, title = "withdrawal_claimed", f"{address}_{request}", "Withdrawal claimed"
        payload = {
            "tx_hash": tx_hash,
            "request_id": request,
            "recipient": checksum(bytes.fromhex(log.topics[3][26:])),
            "owner": checksum(bytes.fromhex(log.topics[2][26:])),
            "amount_eth": eth_text(amount),
            "withdrawal_queue_address": address,
        }
        message = f"Withdrawal request {request} of vault {owner} paid {eth_text(amount)} ETH."
    event_id = f"{kind}_acme_{suffix}"
    body = msgspec.json.encode(
        {
            "id": event_id,
            "account_ref_id": "acme",
            "staking_vault_id": owner,
            "event_type": kind,
            "severity": "info",
            "title": title,
            "message": message,
            "payload": payload,
            "created_at": time_s * 1000,
        }
    )
    return (seq, "acme", event_id, owner, kind, int(log.block_number, 16), time_s * 1000, ENCODING, body, False, 1)


async def _copy(task: Task, events: list[_Row], seq: int) -> None:
    columns = ["seq", "account_id", "id", "vault_id", "event_type", "block_number", "created_at_ms", "encoding", "body"]
    deliveries = [
        (task.webhooks * (seq + at) + number + 1, seq + at + 1, f"wh_{number:08d}", "scheduled")
        for at in range(len(events))
        for number in range(task.webhooks)
    ]
    async with task.database.transaction() as connection:
        now = await connection.fetchval("select db_now()")
        queued = [(webhook_id, delivery_id, event_seq, 0, now) for delivery_id, event_seq, webhook_id, _ in deliveries]
        await connection.copy_records_to_table(
            "events", records=events, columns=[*columns, "suppressed", "filter_revision"]
        )
        await connection.copy_records_to_table(
            "deliveries", records=deliveries, columns=["id", "event_seq", "webhook_id", "state"]
        )
        await connection.copy_records_to_table(
            "queue", records=queued, columns=["webhook_id", "delivery_id", "event_seq", "attempts", "due_at"]
        )
