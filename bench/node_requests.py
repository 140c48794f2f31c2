"""What one day of mainnet asks of the nodes, by stream and method: `python3 dev.py bench requests --json`.

7,200 blocks, 225 epochs, one report, 20 vaults with queues and 200 validators. The blooms are full (440 foreign logs a
block). 100 logs of these vaults and 2,000 foreign ones of the same topics lie in random blocks. The clock of the
service is that of the chain: each 12 s a block is mined, every live stream and discovery look once, and each node's
audit as often as it does at that interval. The configurations:

- `two`: two execution nodes and a beacon node, the whole day;
- `deposits`: the same, where the beacon node refuses the list of all validators; a seventh of the day, times 7;
- `lone`: one execution node and a beacon node. Its receipts take long to prove: a seventh of the day, times 7.

`live` and `audit` are calls of a day; a call of a JSON-RPC batch counts as one, as providers bill it. HyperIndex and
Ponder asked 18,167 and 19,190 times for 18,000 blocks with logs; the figures are scaled to the blocks of a day.
The goal is that of `two`. `--blocks 320` is a quick try. The last line is the result; without `--json` tables stand
before it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
from _mockchain import queue, vault
from _result import print_result
from aiohttp import web

from vaultevents import config
from vaultevents.core.units import Address
from vaultevents.devnet.acts import Claim, Funding, Publication, log_of
from vaultevents.devnet.beacon import Beacon
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS, Log, Payout
from vaultevents.devnet.chain import At, Chain
from vaultevents.devnet.deposits import deposit_log
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.validators import paying
from vaultevents.store import accounts
from vaultevents.store.clock import ServiceClock
from vaultevents.store.cursors import open_audits
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.store.pool import Database
from vaultevents.telemetry import configure_logging
from vaultevents.watch.background_audit import IDLE_POLLS, SPAN_S, AuditSource
from vaultevents.watch.prefetch import Prefetcher
from vaultevents.watch.source import Source
from vaultevents.watch.streams import Stream, begin
from vaultevents.watch.watcher import Advanced, advance
from vaultevents.wiring.database import open_store
from vaultevents.wiring.sources import Sources, open_sources

Name = Literal["two", "deposits", "lone"]

BLOCKS, EPOCH, VAULTS, VALIDATORS, STRANGERS = 7200, 32, 20, 200, 400
EVENTS, FOREIGN, WITHDRAWALS = 100, 2000, 16
BEFORE, WARM = 4 * EPOCH, 4 * EPOCH
"""Blocks before the service starts, and while it reads them, until the day begins."""
PARTS: dict[Name, int] = {"two": 1, "deposits": 7, "lone": 7}
GOAL = 12_000
COMPARED_BLOCKS, COMPARED = 18_000, {"hyperindex": 18_167, "ponder": 19_190}
ORACLE = b"\x0a" * 20
_STAKE = 32 * 10**9


class Calls:
    """Calls by what asks and by method."""

    def __init__(self) -> None:
        self.stream = ""
        self.counted: Counter[tuple[str, str]] = Counter()
        self.requests = 0

    def clear(self) -> None:
        self.counted.clear()
        self.requests = 0

    def note(self, methods: Iterable[str]) -> None:
        self.requests += 1
        self.counted.update((self.stream, method) for method in methods)

    def total(self, *, audit: bool) -> int:
        return sum(number for (stream, _), number in self.counted.items() if stream.startswith("audit") == audit)


class CountingNode(ExecutionServer):
    """An execution node that counts what is asked of it."""

    def __init__(self, chain: Chain, calls: Calls) -> None:
        super().__init__(chain)
        self._noted = calls

    async def _exchange(self, request: web.BaseRequest) -> web.StreamResponse:
        sent = msgspec.json.decode(await request.read())
        self._noted.note(call["method"] for call in (sent if isinstance(sent, list) else [sent]))
        return await super()._exchange(request)


class CountingBeacon(BeaconServer):
    """A beacon node that counts what is asked of it."""

    def __init__(self, beacon: Beacon, calls: Calls, list_refusal: int | None) -> None:
        super().__init__(beacon, list_refusal=list_refusal)
        self._noted = calls

    async def _exchange(self, request: web.BaseRequest) -> web.StreamResponse:
        before = self.calls.copy()
        response = await super()._exchange(request)
        self._noted.note(f"beacon {route}" for route in self.calls - before)
        return response


class ChainClock(ServiceClock):
    """The time of the newest block."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._chain.head.timestamp_s, UTC)


class Day:
    """A chain with validators, and what happens on it."""

    def __init__(self, blocks: int) -> None:
        self.chain = Chain(1, chain_id=1)
        self.chain.finalized = At(0)
        self.chain.filler_logs = FULL_BLOCK_LOGS
        self.beacon = Beacon(self.chain, slots_per_epoch=EPOCH)
        self._rng = random.Random(blocks)
        share = blocks / BLOCKS
        self.own = self._places(blocks, round(EVENTS * share))
        self._foreign = self._places(blocks, round(FOREIGN * share))
        self._report_in = self._rng.randrange(blocks)
        self._serial = 0
        self._paid = 0
        self._found()

    def _places(self, blocks: int, logs: int) -> Counter[int]:
        return Counter(self._rng.randrange(blocks) for _ in range(logs))

    def _found(self) -> None:
        registry = self.beacon.registry
        for number in range(VALIDATORS + STRANGERS):
            address = vault(number % VAULTS if number < VALIDATORS else VAULTS + number)
            registry.append(0, number.to_bytes(48), paying(2, address), active=True)
        deposits = self.chain.transaction(map(deposit_log, registry.validators))
        self.chain.mine([self.chain.transaction([], [ORACLE]), deposits])

    def mine(self, at: int | None) -> None:
        """Block `at` of the day, or one before it without events, and the finality that it brings."""
        logs: list[Log] = []
        if at is not None:
            logs += [self._log(own=True) for _ in range(self.own[at])]
            logs += [self._log(own=False) for _ in range(self._foreign[at])]
            logs += [log_of(Publication(ORACLE, 1, 1, bytes(32), "Qm", ()))] * (at == self._report_in)
        self.chain.mine([self.chain.transaction([log]) for log in logs], payouts=self._payouts())
        final = self.beacon.first_slot(max(0, self.beacon.epoch_of(self.chain.head.slot) - 2))
        self.chain.finalized = At(self.chain.last_block_at(final).number)

    def _payouts(self) -> list[Payout]:
        """The sweep; each validator is paid again once all others were, so that some in a day are ours."""
        payouts = []
        for _ in range(WITHDRAWALS):
            self._paid += 1
            number = VALIDATORS + self._paid % STRANGERS
            if self._paid % (BLOCKS * WITHDRAWALS // 25) == 0:
                number = self._paid // (BLOCKS * WITHDRAWALS // 25) % VALIDATORS
            credentials = self.beacon.registry.validators[number].credentials[-1][1]
            payouts.append(Payout(number, credentials[12:], 10**7))
        return payouts

    def _log(self, *, own: bool) -> Log:
        self._serial += 1
        number = self._rng.randrange(VAULTS) if own else VAULTS + self._rng.randrange(VAULTS)
        if self._rng.random() < 0.85:
            return log_of(Funding(vault(number), self._rng.randrange(10**15, 10**20)))
        return log_of(Claim(queue(number), self._serial, vault(0), vault(1), self._rng.randrange(10**15, 10**20)))


@dataclass(slots=True)
class Follower:
    """A cursor that is followed."""

    name: str
    source: Source
    cursor: Cursor
    reader: Prefetcher

    async def look(self, outbox: Outbox) -> None:
        """Read on until nothing is new."""
        while isinstance(outcome := await advance(self.reader, outbox, self.cursor), Advanced):
            self.cursor = outcome.cursor


async def _live(streams: Iterable[Stream], outbox: Outbox) -> list[Follower]:
    return [
        Follower(
            stream.source.stream, stream.source, await begin(stream, outbox), Prefetcher(stream.source, stream.step)
        )
        for stream in streams
    ]


async def _audits(streams: Iterable[Stream], outbox: Outbox, blocks_per_s: float) -> list[Follower]:
    followers = []
    for stream in streams:
        if stream.audit is None:
            continue
        live = await outbox.live(stream.source.stream)
        assert live is not None
        stream.audit.source.resume(live)
        source = AuditSource(stream.audit.source, outbox, stream.audit.final, stream.audit.at_once)
        await open_audits(outbox.database, source.stream, stream.audit.nodes)
        for node in stream.audit.nodes:
            cursor = await outbox.audit(source.stream, node)
            reader = Prefetcher(source, min(stream.step, round(blocks_per_s * SPAN_S)))
            followers.append(Follower(f"audit {source.stream}", source, cursor, reader))
    return followers


async def _through(day: Day, blocks: int, calls: Calls, opened: Sources, database: Database, per_s: float) -> None:
    outbox = Outbox(database)
    assert opened.discovery is not None
    await opened.discovery.step()
    live, audits = await _live(opened.streams, outbox), await _audits(opened.streams, outbox, per_s)
    idle_calls = 0
    with ExitStack() as stack:
        for follower in live + audits:
            stack.callback(follower.reader.close)
        for number in range(-WARM, blocks):
            before = day.chain.finalized_number
            day.mine(number if number >= 0 else None)
            if number == 0:
                calls.clear()
            is_idle = before == day.chain.finalized_number
            if is_idle and number >= 2 * EPOCH and not idle_calls and number % IDLE_POLLS:
                continue  # of the first two epochs each look was made, and those between two finalities asked nothing
            asked = calls.counted.total()
            calls.stream = "discovery"
            await opened.discovery.step()
            for follower in live:
                calls.stream = follower.name
                await follower.look(outbox)
            idle_calls += (calls.counted.total() - asked) * (is_idle and 0 < number < 2 * EPOCH)
            for follower in audits if number % IDLE_POLLS == 0 else ():
                calls.stream = follower.name
                await follower.look(outbox)


async def _run(folder: Path, name: Name, blocks: int) -> dict[str, Any]:
    """What a day asked; the calls by stream and method."""
    day, calls = Day(blocks), Calls()
    for _ in range(BEFORE):
        day.mine(None)
    servers: list[CountingNode | CountingBeacon] = [
        CountingNode(day.chain, calls) for _ in range(1 if name == "lone" else 2)
    ]
    beacon = CountingBeacon(day.beacon, calls, 403 if name == "deposits" else None)
    async with AsyncExitStack() as stack:
        urls = []
        for server in [*servers, beacon]:
            urls.append(await server.start())
            stack.push_async_callback(server.stop)
        values = {
            "network": "mainnet",
            "chain_id": 1,
            "data_dir": str(folder),
            "execution": {"urls": urls[:-1]},
            "beacon": {"urls": urls[-1:], "deposits_from_block": 0},
            "contracts": {"lazy_oracles": [f"0x{ORACLE.hex()}"]},
            "reports": {"gateways": ["http://127.0.0.1:9"]},
        }
        settings = config.given(values, "requests")
        store = await stack.enter_async_context(open_store(settings))
        await accounts.add_account(store.database, "acme", "acme")
        begin_block = day.chain.head.number
        for number in range(VAULTS):
            address, of_vault = Address(vault(number)), Address(queue(number))
            await accounts.add_vault(store.database, "acme", f"v{number}", address, of_vault, begin_block)
        opened = await stack.enter_async_context(open_sources(settings, store.database, ChainClock(day.chain)))
        begun = time.perf_counter()
        await _through(day, blocks, calls, opened, store.database, settings.execution.audit_blocks_per_s)
        seconds = time.perf_counter() - begun
        async with store.database.statement() as connection:
            stored = await connection.fetchval("select count(*) from events where event_type not like 'validator%'")
            paid = await connection.fetchval("select count(*) from events where event_type like 'validator_with%'")
    final = day.chain.finalized_number or 0
    due = sum(number for at, number in day.own.items() if at + begin_block + WARM + 1 <= final)
    return {"calls": calls, "seconds": round(seconds, 1), "stored": stored, "due": due, "paid": paid}


def _figures(name: Name, found: dict[str, Any], factor: int) -> dict[str, Any]:
    calls: Calls = found["calls"]
    live, audit = calls.total(audit=False) * factor, calls.total(audit=True) * factor
    by_method = {f"{stream}: {method}": number * factor for (stream, method), number in sorted(calls.counted.items())}
    return {
        f"{name}_calls": live + audit,
        f"{name}_live": live,
        f"{name}_audit": audit,
        f"{name}_requests": calls.requests * factor,
        f"{name}_seconds": found["seconds"],
        **{f"{name}_{key}": number for key, number in by_method.items()},
    }


def measure(blocks: int, names: Iterable[Name]) -> dict[str, Any]:
    figures: dict[str, Any] = {"blocks": blocks, "vaults": VAULTS, "validators": VALIDATORS}
    complete = True
    goals = []
    for name in names:
        factor = PARTS[name]
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found = asyncio.run(_run(Path(folder), name, blocks // factor))
        complete = complete and found["stored"] == found["due"] and (found["paid"] > 0 or factor > 1 or blocks < BLOCKS)
        figures |= _figures(name, found, factor)
        if name == "two":
            goals.append(figures[f"{name}_calls"] <= GOAL * blocks / BLOCKS)
    compared = {name: round(number * blocks / COMPARED_BLOCKS) for name, number in COMPARED.items()}
    return {
        "bench": "requests",
        "figures": figures,
        "floor": compared,
        "ratio": {},
        "goal": {"calls": GOAL},
        "ok": complete and all(goals),
    }


def _print_table(result: dict[str, Any]) -> None:
    for key, number in result["figures"].items():
        print(f"{key:64} {number:>10}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Counts what a day of mainnet asks of the nodes.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="how much of a day: 7200 is a whole one")
    parser.add_argument("--only", choices=("two", "deposits", "lone"), help="this configuration alone")
    options = parser.parse_args(arguments)
    configure_logging("warning")
    names: tuple[Name, ...] = tuple(PARTS) if options.only is None else (options.only,)
    result = measure(options.blocks, names)
    if not options.json:
        _print_table(result)
    return print_result(result, as_json=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
