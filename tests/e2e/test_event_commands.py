"""event, delivery and webhook show, resend and recover, as an operator uses them beside a running service."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from command_line import Place, asking, place
from timeouts import until
from vaultevents.cli.event import GAP_S, NewEvents
from vaultevents.devnet.receivers import Hook, Reply, always
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.event_search import EventRow
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.e2e


async def test_events_deliveries_and_webhooks(tmp_path: Path, data_dir: Path, server: ServerAddress) -> None:
    simulation = Simulation(5)
    simulation.history(60, 12)
    async with place(tmp_path, data_dir, simulation) as here:
        hooks = await here.subscribed()
        account_id, hook = min(hooks.items())
        webhook_id = f"wh-{account_id}-{here.schema}"
        hook.behaviour = always(Reply(503, body=b"not \x1b[31mnow"))
        running = await here.shell.start("run")
        await until(lambda: len(hook.ledger) >= 2)

        await _events(here, account_id, hook)
        await _deliveries(here, webhook_id)
        hook.behaviour = always(Reply())
        await _actions(here, server, webhook_id, hook)
        await _tail(here, simulation)
        (await running.end()).ok()


async def _events(here: Place, account_id: str, hook: Hook) -> None:
    found = (await here.run("event", "list", "--account", account_id, "--json")).ok().json
    sent = hook.ledger[0]
    row = next(row for row in found["events"] if row["id"] == sent.webhook_id)
    assert row["createdAt"][10] == "T"
    assert {row["accountId"] for row in found["events"]} == {account_id}
    assert [row["createdAt"] for row in found["events"]] == sorted(
        (row["createdAt"] for row in found["events"]), reverse=True
    )
    page = (await here.run("event", "list", "--account", account_id, "--limit", "1", "--json")).ok().json
    rest = (await here.run("event", "list", "--account", account_id, "--before", str(page["next"]), "--json")).ok().json
    assert [row["id"] for row in (*page["events"], *rest["events"])] == [row["id"] for row in found["events"]]
    by_id, none, malformed, body, shown, text, unknown = await asyncio.gather(
        here.run("event", "list", "--id", sent.webhook_id),
        here.run("event", "list", "--account", account_id, "--since", "2999-01-01T00:00:00Z"),
        here.run("event", "list", "--since", "soon"),
        here.run("event", "show", sent.webhook_id, "--body"),
        here.run("event", "show", sent.webhook_id, "--json"),
        here.run("event", "show", sent.webhook_id),
        here.run("event", "show", "nothing"),
    )
    assert by_id.ok().stdout.splitlines()[1].endswith(sent.webhook_id)
    assert none.ok().stdout == "no stored event matches\n"
    assert malformed.error.startswith("--since 'soon' is not a time: write 2026-01-31T12:00:00Z, ")
    assert body.ok().stdout.encode() == sent.body
    assert shown.ok().json["body"].encode() == sent.body
    assert shown.json["deliveries"][0]["attempted"][0]["status"] == 503
    assert "failed, status 503: not " in text.ok().stdout
    assert "\x1b" not in text.stdout
    assert unknown.error.startswith("no event 'nothing' is stored: ")


async def _deliveries(here: Place, webhook_id: str) -> None:
    found = (await here.run("delivery", "list", "--webhook", webhook_id, "--json")).ok().json["deliveries"]
    assert {row["webhookId"] for row in found} == {webhook_id}
    tried = next(row for row in found if row["attempts"])
    shown, unknown, failing, text, nobody = await asyncio.gather(
        here.run("delivery", "show", str(tried["id"]), "--json"),
        here.run("delivery", "show", "999999999"),
        here.run("webhook", "show", webhook_id, "--json"),
        here.run("webhook", "show", webhook_id),
        here.run("webhook", "show", "wh-nobody"),
    )
    assert (shown.ok().json["eventId"], shown.json["attempted"][0]["number"]) == (tried["eventId"], 1)
    assert unknown.error.startswith("there is no delivery 999999999: ")
    assert failing.ok().json["recentAttempts"]["successRate"] == 0
    assert failing.json["lastFailures"][0]["status"] == 503
    assert "0.0% of the last " in text.ok().stdout
    assert nobody.error.startswith("there is no webhook 'wh-nobody': ")


async def _actions(here: Place, server: ServerAddress, webhook_id: str, hook: Hook) -> None:
    event_id = hook.ledger[0].webhook_id
    before = len([request for request in hook.accepted if request.webhook_id == event_id])
    asked = (await here.run("webhook", "resend", webhook_id, event_id, "--json")).ok().json
    assert asked["eventId"] == event_id
    await until(lambda: len([request for request in hook.accepted if request.webhook_id == event_id]) > before)
    unknown, reversed_range, recovered = await asyncio.gather(
        here.run("webhook", "resend", webhook_id, "nothing"),
        here.run("webhook", "recover", webhook_id, "--since", "1h", "--until", "2h"),
        here.run("webhook", "recover", webhook_id, "--since", "2000-01-01T00:00:00Z", "--json"),
    )
    assert unknown.error.startswith("there is no delivery of ")
    assert reversed_range.error == "--until '2h' is not after --since '1h': exchange them"
    assert recovered.ok().json["since"] == "2000-01-01T00:00:00+00:00"
    async with asking(server, here.schema) as connection:
        (actor,) = await connection.fetchrow("select actor from audit_log where action = 'webhook.resend'")
    assert actor.startswith("cli:")


async def _tail(here: Place, simulation: Simulation) -> None:
    tail = await here.shell.start("event", "tail", "--lines", "1", "--json")
    await until(lambda: tail.stdout_so_far.count("\n") >= 1)
    known = tail.stdout_so_far.count("\n")
    simulation.history(60, 12)
    await until(lambda: tail.stdout_so_far.count("\n") >= known + 3)
    done = (await tail.end(signal.SIGINT)).ok()
    ids = [json.loads(line)["id"] for line in done.stdout.splitlines()]
    assert len(ids) == len(set(ids))


def rows(*numbers: int) -> list[EventRow]:
    return [EventRow(n, "acme", f"e{n}", "v", "t", 1, None, None, False, False, None) for n in numbers]  # type: ignore[arg-type]


def test_a_number_that_appears_late_is_new_and_none_is_new_twice() -> None:
    new = NewEvents((5, 6), 0.0)
    assert new.floor == 6
    assert [row.seq for row in new.take(rows(9, 8), 1.0)] == [8, 9]
    assert new.floor == 6, "7 may still be committed"
    assert [row.seq for row in new.take(rows(7, 8, 9), 2.0)] == [7]
    assert new.floor == 9
    assert new.take(rows(9), 3.0) == []


def test_a_number_that_never_appears_is_not_waited_for() -> None:
    new = NewEvents((5,), 0.0)
    new.take(rows(7), 1.0)
    assert [row.seq for row in new.take(rows(7, 8), GAP_S)] == [8]
    assert new.floor == 8
