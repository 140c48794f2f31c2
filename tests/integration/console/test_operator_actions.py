"""Actions of the console: each does what it says, once, in the name of the session, and is in the audit log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
import pytest_asyncio

from console_nodes import running_nodes
from operator_pages import Operator, Sample, operator, sample
from store_factories import KEY, change, own_database, rows, values, webhook
from vaultevents.core.audit_chain import AuditEntry
from vaultevents.core.sealing import open_sealed
from vaultevents.core.spans import Span
from vaultevents.store import audit_log, cursors
from vaultevents.store.outbox import Outbox
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.store.webhooks import disable_webhook

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

EVENTS = "select id from events order by seq"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def full(postgres18: ServerAddress) -> AsyncIterator[Sample]:
    async with running_nodes(600, 10) as nodes, sample(postgres18, nodes) as found:
        yield found


async def newest_act(operator: Operator) -> AuditEntry:
    """The newest entry of the audit log, which has to be of the session."""
    async with operator.database.transaction() as connection:
        (entry,) = await audit_log.entries(connection, limit=1)
        (session,) = await connection.fetch("select id from console_sessions")
        assert (await audit_log.verify(connection)).first_bad is None
    assert entry.actor == f"console:{session['id']}"
    return entry


async def test_a_webhook_that_was_switched_off_is_switched_on(full: Sample) -> None:
    database = full.operator.database
    async with database.transaction() as connection:
        await disable_webhook(connection, full.sound.id, "gone")
    path = f"/webhooks/{full.sound.id}"
    assert "answered 410 (gone)" in (await full.operator.read(path)).words
    done = await full.operator.follow(f"{path}/enable", {})
    assert "The webhook is on" in done.words
    assert await values(database, "select active from webhooks where id = $1", full.sound.id) == [True]
    entry = await newest_act(full.operator)
    assert (entry.action, entry.subject, entry.account_id) == ("webhook.enable", full.sound.id, "acme")


@pytest.mark.parametrize(("lasting", "least"), [("1h", timedelta(minutes=59)), ("", timedelta(days=9999))])
async def test_a_webhook_is_paused_for_a_time_or_until_it_is_switched_on(
    full: Sample, lasting: str, least: timedelta
) -> None:
    added = await webhook(full.operator.database)
    done = await full.operator.follow(f"/webhooks/{added.id}/pause", {"lasting": lasting})
    assert "The webhook is paused" in done.words
    (until,) = await values(full.operator.database, "select paused_until from webhooks where id = $1", added.id)
    assert until - datetime.now(UTC) > least
    assert (await newest_act(full.operator)).action == "webhook.pause"
    await full.operator.submit(f"/webhooks/{added.id}/pause", {"lasting": "99y"}, 400)


async def test_a_test_is_sent_and_its_result_shown(full: Sample) -> None:
    database = full.operator.database
    sent = await full.operator.submit(f"/webhooks/{full.failing.id}/test", {})
    waiting = await full.operator.read(sent.headers["location"])
    assert "is not over yet" in waiting.words
    assert waiting.page.find(".//meta[@http-equiv='refresh']") is not None
    assert (await newest_act(full.operator)).action == "webhook.test"
    finished = "update resends set started_at = db_now(), finished_at = db_now(), duration_ms = 7, excerpt = ''"
    await change(database, f"{finished}, status = 204 where event_seq is null")
    assert "The test was accepted: status 204 after 7 ms." in (await full.operator.read(sent.headers["location"])).words
    await change(database, f"{finished}, status = null, error = 'dns' where event_seq is null")
    refused = (await full.operator.read(sent.headers["location"])).words
    assert "The test was not accepted: dns after 7 ms." in refused
    assert "Check the DNS records" in refused


async def test_one_event_is_sent_again(full: Sample) -> None:
    event_id = (await values(full.operator.database, EVENTS))[0]
    path = f"/webhooks/{full.failing.id}/resend"
    from_event = await full.operator.follow(path, {"event": event_id, "back": "event"})
    assert "One more attempt was asked for." in from_event.words
    assert "One more attempt was asked for." in (await full.operator.follow(path, {"event": event_id})).words
    asked = "select count(*)::int from resends r join queue q on q.resend_id = r.id where r.event_id = $1"
    assert await values(full.operator.database, asked, event_id) == [2]
    entry = await newest_act(full.operator)
    assert (entry.action, entry.subject) == ("webhook.resend", f"{full.failing.id} {event_id}")
    refused = await full.operator.submit(path, {"event": "unknown"}, 400)
    assert "recover it instead" in refused.words


async def test_what_was_missed_is_recovered(full: Sample) -> None:
    added = await webhook(full.operator.database)  # later than the events, so that it has no delivery of them
    done = await full.operator.follow(f"/webhooks/{added.id}/recover", {"since": "2020-01-01T00:00"})
    assert "3 attempts were asked for" in done.words
    entry = await newest_act(full.operator)
    assert (entry.action, entry.subject) == ("webhook.recover", added.id)
    await full.operator.submit(f"/webhooks/{added.id}/recover", {"since": ""}, 400)


async def test_a_secret_is_rotated_and_shown_once(full: Sample) -> None:
    database, webhook_id = full.operator.database, full.sound.id
    shown = await full.operator.submit(f"/webhooks/{webhook_id}/rotate-secret", {"overlap": "1h"}, 200)
    secret = shown.page.find(".//pre").text
    assert shown.headers["cache-control"] == "no-store"
    newest = "select sealed from webhook_secrets where webhook_id = $1 order by created_at desc"
    sealed = await values(database, newest, webhook_id)
    assert len(sealed) == 2
    assert open_sealed(KEY, sealed[0], webhook_id).reveal() == secret
    assert secret not in (await full.operator.read(f"/webhooks/{webhook_id}")).text
    assert (await newest_act(full.operator)).action == "webhook.rotate_secret"
    disclosed = await full.operator.submit(f"/webhooks/{webhook_id}/rotate-secret", {"overlap": ""}, 200)
    assert "not valid any longer" in disclosed.words
    assert len(await values(database, newest, webhook_id)) == 1


async def test_a_range_is_read_again_by_the_watcher(full: Sample) -> None:
    database = full.operator.database
    await change(database, "update cursors set position = 500 where kind = 'live'")
    done = await full.operator.follow("/replay", {"unit": "block", "first": "100", "last": "200"})
    assert "100..200" in done.words
    assert [(c.position + 1, c.stop) for c in await Outbox(database).backfills("logs")] == [(100, 200)]
    entry = await newest_act(full.operator)
    assert (entry.action, entry.subject) == ("stream.replay", "block 100-200")
    # what is going to be read anyway is not read twice, and nothing that was never read
    await full.operator.submit("/replay", {"unit": "block", "first": "0", "last": "550"})
    found = [(c.position + 1, c.stop) for c in await Outbox(database).backfills("logs")]
    assert found == [(100, 200), (1, 99), (201, 500)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"unit": "block", "first": "9", "last": "8"}, "exchange them"),
        ({"unit": "block", "first": "501", "last": "502"}, "nothing was read yet"),
        ({"unit": "epoch", "first": "75", "last": "76"}, "nothing was read yet"),
        ({"unit": "block", "first": "0", "last": "9999"}, "is not final"),
        ({"unit": "block", "first": "x", "last": "5"}, "write a whole number"),
        ({"unit": "block", "first": "", "last": "5"}, "is missing"),
        ({"unit": "year", "first": "1", "last": "5"}, "choose one of"),
        ({"first": "1", "last": "5"}, "is missing"),
    ],
)
async def test_a_range_that_cannot_be_read_is_refused(full: Sample, fields: dict[str, str], reason: str) -> None:
    assert reason in (await full.operator.submit("/replay", fields, 400)).words


async def test_audits_stay_where_they_are_when_a_range_is_read_again(postgres18: ServerAddress) -> None:
    async with own_database(postgres18) as database:
        await cursors.open_stream(database, "logs", 100, None)
        await cursors.open_audits(database, "logs", ["node"])
        await change(database, "update cursors set position = 500 where kind in ('live', 'audit')")
        await cursors.read_again(database, {"logs": Span(200, 300)}, "block 200-300")
        assert await values(database, "select position from cursors where kind = 'audit'") == [500]


@pytest.mark.parametrize("action", ["enable", "pause", "test", "resend", "recover", "rotate-secret"])
async def test_actions_need_a_webhook_that_is_there(full: Sample, action: str) -> None:
    deleted = await webhook(full.operator.database)
    await change(
        full.operator.database, "update webhooks set deleted_at = db_now(), active = false where id = $1", deleted.id
    )
    for webhook_id in ("unknown", deleted.id, "%00"):
        await full.operator.submit(f"/webhooks/{webhook_id}/{action}", {}, 404)
        assert (await full.operator.browser.get(f"/webhooks/{webhook_id}/{action}")).status in (404, 405)


async def test_a_form_without_the_token_does_nothing(full: Sample) -> None:
    before = await rows(full.operator.database, "select count(*) from audit_log")
    answer = await full.operator.browser.post(f"/webhooks/{full.sound.id}/pause", {"lasting": "1h"})
    assert answer.status == 403
    assert await rows(full.operator.database, "select count(*) from audit_log") == before


async def test_from_the_overview_to_the_resend_in_six_clicks(postgres18: ServerAddress) -> None:
    async with sample(postgres18) as found:
        clicks, page = 0, await found.operator.read("/")

        async def click(text: str) -> None:
            nonlocal clicks, page
            (href,) = {a.get("href") for a in page.page.iter("a") if "".join(a.itertext()).strip() == text}
            clicks, page = clicks + 1, await found.operator.read(href)

        await click("Webhooks")
        await click("1 failing")
        await click(found.failing.id)
        assert "To do: Correct the path of the URL." in page.words
        form = next(form for form in page.page.iter("form") if form.get("action").endswith("/resend"))
        fields = {field.get("name"): field.get("value") for field in form.iter("input")}
        answer = await found.operator.follow(form.get("action"), fields)
        assert "One more attempt was asked for." in answer.words
        assert clicks + 1 <= 6


async def test_a_database_without_streams_offers_nothing_to_replay(postgres18: ServerAddress) -> None:
    async with own_database(postgres18) as database, operator(database) as found:
        assert "nothing to replay" in (await found.read("/replay")).words
        await found.submit("/replay", {"unit": "block", "first": "0", "last": "1"}, 400)
