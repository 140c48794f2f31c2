"""A tenant's queue emits what cannot be decoded: the daemon serves all others, and an upgrade delivers the event."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from command_line import CommandLine, Place, Running, delivered, place, wanted
from newer_form import odd_claim
from timeouts import until, until_true
from vaultevents.core.units import Address, checksum, hex_text
from vaultevents.devnet.acts import Claim
from vaultevents.devnet.receivers import Hook
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.e2e

NEWER = str(Path(__file__).resolve().parents[1] / "newer_form.py")
PERSON, OTHER = b"\x51" * 20, b"\x52" * 20


@pytest.fixture
async def here(tmp_path: Path, data_dir: Path, server: object) -> AsyncIterator[Place]:
    simulation = Simulation(3)
    simulation.history(20, 30)
    async with place(tmp_path, data_dir, simulation) as found:
        found.configure(execution="audit_blocks_per_s = 0")
        yield found


def newer(here: Place) -> CommandLine:
    """The same place with a version that knows the odd form."""
    return replace(here.shell, program=(NEWER,))


def mine(here: Place, claims: list[Claim]) -> tuple[int, bytes]:
    """A final block with claims of another form; its number and the hash of the transaction."""
    transaction = here.simulation.chain.transaction([odd_claim(claim) for claim in claims])
    block = here.simulation.chain.mine([transaction])
    for _ in range(4):
        here.simulation.step()
    return block.number, transaction.hash


async def all_delivered(here: Place, hooks: dict[str, Hook]) -> None:
    await until(lambda: all(delivered(hook).keys() >= wanted(here.simulation, name) for name, hook in hooks.items()))


async def api_answers(running: Running) -> bool:
    lines = [json.loads(line) for line in running.stderr_so_far.splitlines() if '"api_listens"' in line]
    async with aiohttp.ClientSession() as session, session.get(lines[-1]["url"] + "/v1/openapi.json") as answer:
        return answer.status == 200


async def test_everybody_else_is_served_and_after_an_upgrade_a_retry_delivers(here: Place) -> None:
    hooks = await here.subscribed()
    first = next(vault for vault in here.simulation.registrations if vault.queue is not None)
    assert first.queue is not None
    running = await here.shell.start("run", "--json")
    await all_delivered(here, hooks)
    claims = [Claim(first.queue, 10**9 + number, PERSON, OTHER, 10**15) for number in range(3)]
    block, tx_hash = mine(here, claims[:1])
    other, _ = mine(here, claims[1:])
    await running.said('"logs_quarantined"')
    await all_delivered(here, hooks)
    assert await api_answers(running)
    await running.end(signal.SIGKILL)
    running = await here.shell.start("run")
    for _ in range(5):
        here.simulation.step()
    await all_delivered(here, hooks)
    await running.said('"api_listens"')
    assert await api_answers(running)

    reported = (await here.run("status")).ok().stdout
    assert "quarantine  3 logs cannot be decoded: see 'vaultevents quarantine list'" in reported
    assert (await here.status())["quarantine_open"] == 3
    listed = (await here.run("quarantine", "list", "--json")).ok().json
    assert (listed["open"], listed["next"], len(listed["logs"])) == (3, None, 3)
    entry = listed["logs"][-1]
    owners = sorted({vault.account_id for vault in here.simulation.registrations if vault.queue == first.queue})
    assert len(owners) == 2
    assert (entry["block"], entry["logIndex"], entry["txHash"]) == (block, 0, hex_text(tx_hash))
    assert (entry["address"], entry["accounts"]) == (checksum(Address(first.queue)), owners)
    page = (await here.run("quarantine", "list", "--json", "--limit", "2")).ok().json
    rest = (await here.run("quarantine", "list", "--json", "--before", str(page["next"]))).ok().json
    assert [log["id"] for log in page["logs"] + rest["logs"]] == [log["id"] for log in listed["logs"]]
    shown = (await here.run("quarantine", "show", str(entry["id"]), "--json")).ok().json
    assert (shown["data"], len(shown["topics"])) == (hex_text(odd_claim(claims[0]).data), 1)
    assert "it has 1 topics and 128 bytes of data, not 4 and 32" in (await here.run("quarantine", "list")).ok().stdout
    assert hex_text(tx_hash) in (await here.run("quarantine", "show", str(entry["id"]))).ok().stdout

    early = await here.run("quarantine", "retry", "--all", "--json")
    assert (early.code, early.json["resolved"], early.json["open"]) == (1, 0, 2)
    (await running.end()).ok()
    running = await newer(here).start("run")
    await running.said('"started"')
    assert here.simulation.expected().keys() >= {(owner, name) for owner in owners for name in delivered(hooks[owner])}
    here.simulation.acts[tx_hash] = (claims[0],)
    due = {owner: wanted(here.simulation, owner) - delivered(hooks[owner]).keys() for owner in owners}
    assert [len(ids) for ids in due.values()] == [1, 1]
    late = (await newer(here).run("quarantine", "retry", str(entry["id"]), "--json")).ok().json
    (retried,) = late["blocks"]
    assert (retried["block"], retried["resolved"], retried["inserted"]) == (block, [entry["id"]], 2)
    assert (retried["left"], retried["problem"]) == ([], None)
    await all_delivered(here, hooks)
    for name, hook in hooks.items():
        assert delivered(hook).keys() == wanted(here.simulation, name), "that event and no other"
        bodies = {request.webhook_id: request.body for request in hook.accepted}
        assert bodies == {key: body for (owner, key), body in here.simulation.expected().items() if owner == name}
    rows = (await newer(here).run("quarantine", "retry", "--all")).ok().stdout
    assert f"block {other} of logs: 2 logs resolved" in rows
    assert "no quarantined log is open" in (await here.run("quarantine", "retry", "--all")).ok().stdout
    assert (await here.status())["quarantine_open"] == 0
    (await running.end()).ok()


async def test_vaults_are_removed_and_rows_dismissed_while_the_daemon_goes_on(here: Place) -> None:
    hooks = await here.subscribed()
    first = next(vault for vault in here.simulation.registrations if vault.queue is not None)
    assert first.queue is not None
    running = await here.shell.start("run")
    mine(here, [Claim(first.queue, 10**9 + number, PERSON, OTHER, 1) for number in range(4)])
    await running.said('"log_quarantined"')
    (await here.run("vault", "remove", first.account_id, first.vault_id)).ok()
    await all_delivered(here, {name: hook for name, hook in hooks.items() if name != first.account_id})
    ids = [str(log["id"]) for log in (await here.run("quarantine", "list", "--json")).ok().json["logs"]]
    assert "--reason" in (await here.run("quarantine", "dismiss", ids[0])).stderr
    assert "say why" in (await here.run("quarantine", "dismiss", ids[0], "--reason", " ")).error
    assert (await here.run("quarantine", "dismiss", ids[0], "--reason", "no queue", "--json")).ok().json == {
        "dismissed": 1,
        "ids": [int(ids[0])],
    }
    assert "is dismissed: leave it out" in (await here.run("quarantine", "dismiss", ids[0], "--reason", "x")).error
    address = checksum(Address(first.queue))
    done = (await here.run("quarantine", "dismiss", "--address", address, "--reason", "a test", "--json")).ok().json
    assert sorted(done["ids"]) == sorted(map(int, ids[1:]))
    assert (
        "no open quarantined log"
        in (await here.run("quarantine", "dismiss", "--address", address, "--reason", "a test")).error
    )
    kept = (await here.run("quarantine", "list", "--state", "all", "--json")).ok().json
    assert {(log["state"], log["dismissedBecause"]) for log in kept["logs"]} == {
        ("dismissed", "a test"),
        ("dismissed", "no queue"),
    }
    assert "no quarantined log has the id 999" in (await here.run("quarantine", "show", "999")).error
    assert (await here.run("quarantine", "retry")).code == 2
    (await running.end()).ok()


async def test_a_block_that_is_not_final_any_longer_is_named_and_stays(here: Place) -> None:
    await here.subscribed()
    first = next(vault for vault in here.simulation.registrations if vault.queue is not None)
    assert first.queue is not None
    running = await here.shell.start("run")
    mine(here, [Claim(first.queue, 10**9, PERSON, OTHER, 1)])

    async def is_listed() -> bool:
        return bool((await here.status())["quarantine_open"])

    await until_true(is_listed)
    (await running.end()).ok()
    head = here.simulation.chain.finalized
    here.simulation.chain.finalized = type(head)(10_000)
    early = await newer(here).run("quarantine", "retry", "--all", "--json")
    assert (early.code, early.json["resolved"]) == (1, 0)
    assert "is not final yet" in early.json["blocks"][0]["problem"]
    here.simulation.chain.finalized = head
    assert (await newer(here).run("quarantine", "retry", "--all", "--json")).ok().json["resolved"] == 1
