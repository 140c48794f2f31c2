"""Whose fault it is that a report gives no events: a gateway's, or its own (rule C6)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from report_fixtures import Change, final_reports, five_values, other_values, spoil, without
from simulation_fixtures import Rows, read_to_head, register, rows
from store_factories import shift_clock
from vaultevents.chain.execution.client import ExecutionChain, HeadPolicy
from vaultevents.chain.ipfs import IpfsClient, IpfsLimits
from vaultevents.core.units import Address
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.gateway import Gateway, Trouble
from vaultevents.devnet.simulation import Simulation
from vaultevents.egress import Guard
from vaultevents.store import cursors
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.reports import due_reports, find_reports
from vaultevents.watch.reports import ReportsSource, Resolver

pytestmark = pytest.mark.integration

LIMITS = IpfsLimits(attempt_s=5.0, gateway_s=10.0, retry_wait_s=0.01, set_aside_s=60.0)
SPOILED = 4


@dataclass(frozen=True, slots=True)
class Reading:
    """A simulation's reports stream, its resolver and two gateways, the first one preferred."""

    source: ReportsSource
    resolver: Resolver
    files: IpfsClient
    outbox: Outbox
    gateways: tuple[Gateway, Gateway]

    async def resolve_due(self) -> None:
        await read_to_head(self.source, self.outbox, 25)
        for report in await due_reports(self.outbox.database, 1000):
            await self.resolver._attempt(report)

    def circuits(self) -> list[str]:
        return [memory.state for memory in self.files.node_states()]


@asynccontextmanager
async def reading(database: Database, made: Simulation, cache: Path) -> AsyncIterator[Reading]:
    node, gateways = ExecutionServer(made.chain), (Gateway(made.report_files), Gateway(made.report_files))
    urls = [await gateway.start() for gateway in gateways]
    guard = Guard(UrlRules(allow=(parse_allow("127.0.0.0/8:*"),)))
    try:
        async with (
            ExecutionChain([await node.start()], head=HeadPolicy()) as chain,
            IpfsClient(urls, guard=guard, cache_dir=cache, limits=LIMITS) as files,
        ):
            outbox = Outbox(database)
            await register(database, made)
            await cursors.open_stream(database, "reports", 0, None)
            source = ReportsSource(chain, [Address(made.lazy_oracle)])
            yield Reading(source, Resolver(outbox, files, 0.05), files, outbox, gateways)
    finally:
        await node.stop()
        for gateway in gateways:
            await gateway.stop()


def simulation(seed: int = 5) -> Simulation:
    made = Simulation(seed, report_every=12)
    made.history(120)
    return made


def due(made: Simulation) -> Rows:
    return dict(made.expected(event_types=["report_update_available"]))


@pytest.mark.parametrize(
    ("change", "problem"),
    [(five_values, "leafEncoding of the file is not the known six types"), (other_values, "have the root 0x")],
)
async def test_a_published_file_that_cannot_be_read_is_the_fault_of_its_report_alone(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, problem: str
) -> None:
    spoiled = spoil(monkeypatch, SPOILED, change)
    made = simulation()
    bad = final_reports(made)[spoiled.cid]
    async with reading(database, made, tmp_path) as found:
        await found.resolve_due()
        assert found.circuits() == ["closed", "closed"]
        assert found.files.counters.node_faults == 0
        assert found.gateways[1].calls.total() == 0, "no other gateway is asked for what the first one gave"
        stored = await rows(database)
        assert stored == without(due(made), bad)
        assert len(stored) < len(due(made))
        (report,) = [one for one in await find_reports(database) if one.state == "pending"]
        assert (report.log.cid, report.failure) == (spoiled.cid, "undecodable")
        assert report.problem is not None and problem in report.problem

        await shift_clock(database, 3600)
        await found.resolve_due()
        assert found.gateways[0].calls[spoiled.cid] == 1, "the file is kept, so it is not downloaded again"
        (again,) = [one for one in await find_reports(database) if one.state == "pending"]
        assert again.attempts == 2
        assert found.circuits() == ["closed", "closed"]
        print(f"{len(stored)} of {len(due(made))} events, 1 report undecodable, circuits {found.circuits()}")


async def test_bytes_of_another_file_are_the_fault_of_the_gateway_that_gives_them(
    database: Database, tmp_path: Path
) -> None:
    made = simulation()
    chosen = list(final_reports(made))[2]
    async with reading(database, made, tmp_path) as found:
        found.gateways[0].troubles[chosen] = Trouble.WRONG_FILE
        await found.resolve_due()
        assert await rows(database) == due(made), "the other gateway has the file"
        assert found.circuits() == ["open", "closed"]
        assert found.files.counters.node_faults == 1


@pytest.mark.parametrize(
    ("troubles", "failure"),
    [
        ((Trouble.MISSING, Trouble.MISSING), "unavailable"),
        ((Trouble.WRONG_FILE, Trouble.WRONG_FILE), "mismatch"),
        ((Trouble.WRONG_FILE, Trouble.MISSING), "mismatch"),
        ((Trouble.MISSING, Trouble.WRONG_FILE), "mismatch"),
    ],
)
async def test_the_kind_of_a_failure_is_kept_until_the_file_is_there(
    database: Database, tmp_path: Path, troubles: tuple[Trouble, Trouble], failure: str
) -> None:
    made = simulation()
    chosen = list(final_reports(made))[2]
    async with reading(database, made, tmp_path) as found:
        for gateway, trouble in zip(found.gateways, troubles, strict=True):
            gateway.troubles[chosen] = trouble
        await found.resolve_due()
        assert await rows(database) == without(due(made), final_reports(made)[chosen])
        assert [report.failure for report in await find_reports(database, chosen)] == [failure]
        for gateway in found.gateways:
            gateway.troubles.clear()
        await shift_clock(database, 3600)
        await found.resolve_due()
        assert await rows(database) == due(made)
        assert [(report.state, report.failure, report.problem) for report in await find_reports(database, chosen)] == [
            ("resolved", None, None)
        ]


async def test_a_cid_of_an_unknown_form_is_asked_of_no_gateway(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_leaf = "bafkreigh2akiscaildcqabsyg3dfr6chu3fgpregiymsck7e7aqa4s52zy"
    spoiled = spoil(monkeypatch, SPOILED, five_values, raw_leaf)
    made = simulation()
    assert spoiled.cid in final_reports(made)
    async with reading(database, made, tmp_path) as found:
        await found.resolve_due()
        assert [gateway.calls[raw_leaf] for gateway in found.gateways] == [0, 0]
        assert found.circuits() == ["closed", "closed"]
        assert await rows(database) == without(due(made), final_reports(made)[raw_leaf])
        (report,) = await find_reports(database, raw_leaf)
        assert (report.state, report.failure) == ("pending", "undecodable")
        assert report.problem is not None and "not that of a dag-pb node" in report.problem
