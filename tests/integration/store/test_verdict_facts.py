"""What the verdict is derived from, as the database and this process have it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from store_factories import some_deliveries
from vaultevents import metrics
from vaultevents.core.verdict import RECENT_S, conditions
from vaultevents.store import verdict_facts
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_recent", {})
    monkeypatch.setattr(metrics, "_heads", {})


async def test_a_new_database_is_healthy(any_database: Database) -> None:
    assert conditions(await verdict_facts.read(any_database)) == ()


async def test_the_head_of_a_stream_is_the_one_of_the_caller_or_of_this_process(database: Database) -> None:
    await some_deliveries(database, 1)
    assert (await verdict_facts.read(database)).streams["logs"].lag is None
    metrics.head("logs", 31)
    assert (await verdict_facts.read(database)).streams["logs"].lag == 30
    assert (await verdict_facts.read(database, heads={"logs": 101})).streams["logs"].lag == 100


async def test_the_disks_that_exist_are_looked_at(database: Database, tmp_path: Path) -> None:
    facts = await verdict_facts.read(database, disks={"data": tmp_path, "database": tmp_path / "missing"})
    assert facts.disk_free.keys() == {"data"}
    assert 0 < facts.disk_free["data"] <= 1


async def test_what_was_counted_is_forgotten_after_a_while(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    metrics.node_failure("node_fault")
    metrics.refusal("token_replayed")
    metrics.refusal("rate_limited")
    metrics.audit_finding("missing", 2)
    metrics.blooms(4, 1)
    metrics.add([(("vaultevents_leases", "ended"), 3)])  # counted by another process
    for clock.now_s in (0.0, RECENT_S):
        facts = await verdict_facts.read(database)
        assert facts.recent_node_failures["node_fault"] == facts.recent_replayed_tokens == 1
        assert facts.recent_audit_findings["missing"] == 2
        assert facts.recent_ended_leases == 3
        assert facts.recent_unsettled_blooms == 1
    clock.now_s += 1
    assert conditions(await verdict_facts.read(database)) == ()
