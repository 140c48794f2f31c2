"""What was stored is found again: replays, estimates and audits, as a user runs them after the daemon."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from command_line import Place, asking, delivered, place, wanted
from timeouts import WAIT_TIMEOUT_S, until
from vaultevents.chain.upstream.redaction import node_name
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.receivers import Hook
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.e2e


@pytest.fixture
async def here(tmp_path: Path, data_dir: Path, server: ServerAddress) -> AsyncIterator[Place]:
    simulation = Simulation(3)
    simulation.history(20, 30)
    async with place(tmp_path, data_dir, simulation) as found:
        yield found


async def stored(server: ServerAddress, here: Place) -> dict[tuple[str, str], bytes]:
    async with asking(server, here.schema) as connection:
        rows = await connection.fetch("select account_id, id, body from events")
    return {(row["account_id"], row["id"]): row["body"] for row in rows}


async def test_run_delivers_and_replay_finds_the_same(here: Place, server: ServerAddress) -> None:
    hook = (await here.subscribed())["acme"]
    running = await here.shell.start("run", "--json")
    await until(lambda: delivered(hook).keys() >= wanted(here.simulation, "acme"))
    for _ in range(4):
        here.simulation.step()
    await until(lambda: delivered(hook).keys() >= wanted(here.simulation, "acme"))
    beside = await here.status()
    assert beside["deliveries"].keys() == {"delivered"}
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not any(audit["position"] >= audit["first"] for audit in (await here.status())["audits"]):
            await asyncio.sleep(0.1)
    ended = (await running.end(signal.SIGTERM)).ok()

    events = here.simulation.expected()
    assert await stored(server, here) == events
    assert delivered(hook).keys() == wanted(here.simulation, "acme")
    assert ended.json == {
        "derived": len(events),
        "identical": 0,
        "inserted": len(events),
        "different": 0,
        "near_head": 0,
    }
    assert {"started", "stopping", "dispatch_drained", "attempts_settled"} <= {line["event"] for line in ended.logs}

    after = await here.status()
    (live,) = after["cursors"]
    assert (live["kind"], live["position"], after["head"]) == (
        "live",
        after["head"],
        here.simulation.chain.finalized_number,
    )
    assert after["events"] == len(events)

    (audited,) = after["audits"]
    assert (audited["kind"], audited["first"]) == ("audit", 1)
    assert f"audit       logs at {audited['node']}: blocks 1 to " in (await here.run("status")).ok().stdout

    whole = ("--from-block", "0", "--to-block", str(after["head"]), "--json")
    await prove(here, whole, len(events))
    same = {"derived": len(events), "identical": len(events), "inserted": 0, "different": 0, "near_head": 0}
    assert (await here.run("replay", *whole)).ok().json == {**same, "failures": []}
    await restore(here, server, whole, hook)
    await alter(here, server, whole)


async def test_status_reports_the_nodes_and_their_limits_outlive_the_daemon(here: Place) -> None:
    here.node.node.max_range = 7
    dead = "http://127.0.0.1:1/k3y-that-must-not-show"
    here.config.write_text(here.config.read_text().replace(f'"{here.url}"', f'"{dead}", "{here.url}"'))
    hook = (await here.subscribed())["acme"]
    running = await here.shell.start("run", "--json")
    await until(lambda: delivered(hook).keys() >= wanted(here.simulation, "acme"))
    assert "log_range_refused" in {line["event"] for line in (await running.end(signal.SIGTERM)).ok().logs}

    reported = (await here.run("status")).ok()
    rows = {words[0]: words for line in reported.stdout.splitlines() if (words := line.split())[1:2] == ["execution"]}
    assert (rows[node_name(dead)][2], rows[node_name(here.url)][2]) == ("open", "closed")
    assert "7" in rows[node_name(here.url)]
    assert "cannot be reached (ClientConnectorError)" in reported.stdout
    assert "k3y" not in reported.stdout + reported.stderr

    whole = ("--from-block", "0", "--to-block", str(here.simulation.chain.finalized_number), "--json")
    again = (await here.run("replay", *whole)).ok()
    assert "log_range_refused" not in {line["event"] for line in again.logs}


async def prove(here: Place, whole: tuple[str, ...], events: int) -> None:
    """An estimate writes nothing, and the audit finds the range whole, by its own node and by another one."""
    blocks = here.simulation.chain.finalized_number
    reported = (await here.run("replay", *whole, "--estimate")).ok().json
    assert [(stream["stream"], stream["positions"]) for stream in reported["streams"]] == [("logs", (blocks or 0) + 1)]
    assert reported["calls"] >= reported["requests"] >= 1
    assert "based on" in (await here.run("replay", *whole[:-1], "--estimate")).ok().stdout
    own = (await here.run("audit", "chain", *whole)).ok().json
    assert (own["ok"], own["events"]["same"], own["events"]["missing"]) == (True, events, 0)
    second = ExecutionServer(here.simulation.chain)
    two = {"VAULTEVENTS_EXECUTION__URLS": f"{here.url},{here.url}/2"}
    try:
        url = f"{await second.start()}/secret"
        other = (await here.run("audit", "chain", *whole, "--second-node", url, **two)).ok()
    finally:
        await second.stop()
    assert other.json == own
    assert "secret" not in other.stdout + other.stderr
    assert second.calls["eth_getBlockReceipts"] == own["blocks_read"] > 0
    stranger = ExecutionServer(Simulation(99).chain)
    try:
        reported = await here.run("audit", "chain", *whole, "--second-node", await stranger.start())
    finally:
        await stranger.stop()
    assert "belongs to another network" in reported.error


async def restore(here: Place, server: ServerAddress, whole: tuple[str, ...], hook: Hook) -> None:
    """Rows that are gone come back byte for byte, and are delivered unless the operator says otherwise."""
    events, before = here.simulation.expected(), len(hook.ledger)
    async with asking(server, here.schema) as connection:
        await connection.execute("truncate attempts, deliveries, events")
    back = (await here.run("replay", *whole, "--no-deliver")).ok().json
    counts = {"derived": len(events), "identical": 0, "inserted": len(events), "different": 0, "near_head": 0}
    assert back == {**counts, "failures": []}
    assert await stored(server, here) == events
    assert (await here.status())["deliveries"] == {}
    async with asking(server, here.schema) as connection:
        lost = await connection.fetchval("delete from events where seq = (select min(seq) from events) returning id")
    assert (await here.run("replay", *whole)).ok().json["inserted"] == 1
    assert await stored(server, here) == events
    assert (await here.status())["deliveries"].get("scheduled", 0) == (lost in wanted(here.simulation, "acme"))
    assert len(hook.ledger) == before, "a replay stores; the daemon delivers"


async def alter(here: Place, server: ServerAddress, whole: tuple[str, ...]) -> None:
    """A row that somebody changed is named, and left as it is."""
    async with asking(server, here.schema) as connection:
        changed = await connection.fetchval(
            "update events set body = '{}' where seq = (select min(seq) from events) returning id"
        )
    done = await here.run("replay", *whole)
    assert "1 stored events are not what the chain gives, and were left as they are" in done.error
    assert changed in done.error
    assert done.json["different"] == 1
    assert done.json["inserted"] == 0
    assert b"{}" in (await stored(server, here)).values()
    audited = await here.run("audit", "chain", *whole)
    assert (audited.code, audited.json["ok"], audited.json["events"]["ids"]["different"]) == (1, False, [changed])
    reported = await here.run("audit", "chain", *whole[:-1])
    assert (reported.code, f"DIFFERENT   {changed}" in reported.stdout) == (1, True)


async def test_audit_proves_the_ledger_and_names_what_breaks_it(here: Place, server: ServerAddress) -> None:
    hooks = await here.subscribed()
    running = await here.shell.start("run")
    await until(lambda: all(delivered(hook).keys() >= wanted(here.simulation, name) for name, hook in hooks.items()))
    (await running.end()).ok()
    clean = (await here.run("audit", "deliveries", "--json")).ok()
    reported = clean.json
    assert (reported["ok"], reported["broken"], reported["breaches"]) == (True, 0, [])
    assert reported["states"] == {"delivered": sum(len(delivered(hook)) for hook in hooks.values())}
    assert (await here.run("audit", "deliveries", "--json")).ok().json["accounts"] == reported["accounts"]
    assert "it adds up: no breach" in (await here.run("audit", "deliveries")).ok().stdout
    one = reported["accounts"][0]["account_id"]
    assert (await here.run("audit", "deliveries", "--account", one, "--json")).ok().json["accounts"] == [
        reported["accounts"][0]
    ]
    assert "there is no account 'nobody'" in (await here.run("audit", "deliveries", "--account", "nobody")).error
    async with asking(server, here.schema) as connection:
        await connection.execute("delete from attempts where delivery_id = (select min(id) from deliveries)")
        await connection.execute("delete from deliveries where id = (select min(id) from deliveries)")
    broken = await here.run("audit", "deliveries")
    assert broken.code == 1
    assert "is missing" in broken.stdout
    assert "1 in all" in broken.stdout
    assert (await here.run("audit", "deliveries", "--json")).json["broken"] == 1


async def test_replay_refuses_what_is_not_final_or_would_be_silenced(here: Place) -> None:
    head = here.simulation.chain.finalized_number
    assert head is not None
    beyond = await here.run("replay", "--from-block", "0", "--to-block", str(head + 1))
    assert f"block {head + 1} is not final" in beyond.error
    assert f"replay up to {head}" in beyond.error
    backwards = await here.run("replay", "--from-block", "5", "--to-block", "4")
    assert "--to-block 4 lies before --from-block 5" in backwards.error
    await here.subscribed()
    silent = await here.run("replay", "--from-block", "0", "--to-block", str(head), "--no-deliver")
    assert "still to be read live" in silent.error
    assert (await here.status())["cursors"] == [], "the replay's cursor is gone"
