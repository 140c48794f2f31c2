"""Pages of events, webhooks, vaults and accounts: what they show, and that nothing of a customer is markup on them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from urllib.parse import quote

import html5lib
import pytest
import pytest_asyncio

from operator_pages import SVG, XSS, Operator, Sample, add_markup, injected, operator, sample, spaced
from store_factories import change, own_database, tx_hash, values
from vaultevents.core.units import hex_text
from vaultevents.store import apikeys
from vaultevents.store.key_uses import KeyUses
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

FUNDING = f"funding_received_acme_{hex_text(tx_hash(1)).upper()}"
EVENT = f"/events/acme/{FUNDING}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def full(postgres18: ServerAddress) -> AsyncIterator[Sample]:
    async with sample(postgres18) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def empty(postgres18: ServerAddress) -> AsyncIterator[Operator]:
    async with own_database(postgres18) as database, operator(database) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/events", "No event is stored yet."),
        ("/events?account=nobody", "No event matches."),
        ("/webhooks", "There is no webhook yet"),
        ("/webhooks?state=failing", "No webhook matches."),
        ("/vaults", "There is no further account."),
        ("/replay", "Nothing was read yet"),
    ],
)
async def test_pages_of_an_empty_database_say_so(empty: Operator, path: str, text: str) -> None:
    assert text in (await empty.read(path)).words


@pytest.mark.parametrize(
    "path",
    [
        "/events/acme/unknown",
        "/events/unknown",
        f"/events/{FUNDING}",
        "/events/acme/%00",
        f"/events/{quote(XSS, safe='')}",
        "/webhooks/unknown",
        "/webhooks/%00",
        f"/webhooks/{quote(XSS, safe='')}",
        "/vaults/unknown",
        "/vaults/unknown/v1",
        "/vaults/acme/x%20y",
        "/vaults/" + "x" * 2000,
    ],
)
async def test_what_is_not_there_is_a_page_that_says_so(empty: Operator, path: str) -> None:
    answer = await empty.browser.get(path)
    if answer.status == 303:  # an id names its account
        answer = await empty.browser.get(answer.headers["location"])
    assert answer.status == 404
    assert "There is nothing here" in answer.words
    assert injected(answer.page) == []


@pytest.mark.parametrize(
    "query",
    [
        "block=x",
        f"block={2**63}",
        f"block={'0' * 20}{'9' * 30}",
        "block=-1",
        "since=yesterday",
        "since=9999-12-31T23:59:59-23:59",
        "type=other",
        "tx=0x12",
        "account=%00",
        "before=x",
        "before=12345",
        f"id={'x' * 600}",
        f"type={quote(XSS)}",
    ],
)
async def test_filters_that_mean_nothing_are_refused_with_a_reason(empty: Operator, query: str) -> None:
    if query == "before=12345":
        query += "&account=acme"
    answer = await empty.read(f"/events?{query}", 400)
    assert answer.page.find(".//p[@role='alert']") is not None


async def test_filters_are_kept_in_the_form_and_in_the_links(full: Sample) -> None:
    answer = await full.operator.read("/events?account=acme&type=funding_received&since=2000-01-01T00:00:00&id=funding")
    assert answer.field("account") == "acme"
    assert answer.field("since") == "2000-01-01T00:00:00"
    assert answer.text.count("/events/acme/funding_received") == 2


@pytest.mark.parametrize(
    ("query", "number"),
    [
        ("", 3),
        ("type=withdrawal_claimed", 1),
        ("account=acme&vault=v1", 3),
        ("block=1", 0),
        ("block=10", 3),
        (f"id={FUNDING}", 1),
        ("id=withdrawal_claimed", 1),
        (f"tx={hex_text(tx_hash(1))}", 1),
        ("until=2020-01-01T00:00", 0),
    ],
)
async def test_events_are_found_by_each_filter(full: Sample, query: str, number: int) -> None:
    answer = await full.operator.read(f"/events?{query}")
    assert len(answer.page.findall(".//tbody/tr")) == number


async def test_pages_of_events_follow_each_other(full: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vaultevents.console.events.ROWS", 2)
    first = await full.operator.read("/events?account=acme")
    (link,) = [a.get("href") for a in first.page.iter("a") if a.get("rel") == "next"]
    assert link.startswith("/events?account=acme&before=")
    second = await full.operator.read(link)
    assert [len(page.page.findall(".//tbody/tr")) for page in (first, second)] == [2, 1]
    assert "Older" not in second.words


async def test_an_event_is_shown_with_its_bytes_its_source_and_all_attempts(full: Sample) -> None:
    answer = await full.operator.read(EVENT)
    (body,) = await values(full.operator.database, "select body from events where id = $1", FUNDING)
    exact, pretty = answer.page.findall(".//pre")
    assert exact.text.encode() == body
    assert json.loads(pretty.text) == json.loads(body)
    words = spaced(answer.page)
    for expected in (
        f"Exactly these {len(body)} bytes",
        f"Transaction {hex_text(tx_hash(1))}",
        "Block 10",
        "404 from 192.0.2.7",
        "There is nothing at this path. Correct the path of the URL.",
        "200 from 192.0.2.8",
        "10, 20, 30, 90, 100",
        "The next attempt is due",
    ):
        assert expected in words, expected
    assert XSS in words  # the excerpt of the answer, as text
    phases = {rect.get("class") for svg in answer.page.iter(f"{SVG}svg") for rect in svg.iter(f"{SVG}rect")}
    assert phases == {"phase-dns", "phase-connect", "phase-tls", "phase-wait", "phase-body"}


async def test_an_event_is_found_by_its_id_alone(full: Sample) -> None:
    assert (await full.operator.browser.get(f"/events/{FUNDING}")).headers["location"] == EVENT


async def test_webhooks_of_an_event_are_paged(full: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vaultevents.console.events.WEBHOOKS", 1)
    first = await full.operator.read(EVENT)
    (link,) = [a.get("href") for a in first.page.iter("a") if a.get("rel") == "next"]
    second = await full.operator.read(link)
    shown = [next(page.page.iter("h3")).find("a").text for page in (first, second)]
    assert shown == [full.failing.id, full.sound.id]


async def test_a_failing_webhook_says_why_and_what_to_do(full: Sample) -> None:
    row = await full.operator.words("/webhooks?state=failing")
    assert full.failing.id in row
    assert full.sound.id not in row
    words = await full.operator.words(f"/webhooks/{full.failing.id}")
    for expected in (
        "404 in 3 of the last 3 failures. There is nothing at this path.",
        "To do: Correct the path of the URL.",
        "Accepted 0 % of the last 3 attempts",
        "Failures in a row 3",
        "https://failing.example/hook",
        "Event types all",
        "3 scheduled",
    ):
        assert expected in words, expected
    sound = await full.operator.words(f"/webhooks/{full.sound.id}")
    assert "Accepted 100 % of the last 2 attempts" in sound
    assert "To do" not in sound
    assert "Event types funding_received" in sound


async def test_deliveries_of_a_webhook_are_filtered_and_paged(full: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vaultevents.console.webhooks.DELIVERIES", 2)
    path = f"/webhooks/{full.failing.id}"
    first = await full.operator.read(f"{path}?state=scheduled")
    (link,) = [a.get("href") for a in first.page.iter("a") if a.get("rel") == "next"]
    assert link.startswith(f"{path}?state=scheduled&before=")
    assert "under way" not in await full.operator.words(link)
    assert "There is no such delivery." in await full.operator.words(f"{path}?state=delivered")
    assert (await full.operator.read(f"{path}?state=other", 400)).status == 400


async def test_a_vault_and_its_account(full: Sample) -> None:
    database = full.operator.database
    await apikeys.add_key(database, "key-1", "acme", "ours", "manage", bytes(32), ("10.0.0.0/8",), b"der", "SHA256:x")
    page = await full.operator.words("/vaults")
    assert "acme Acme" in page and "1 to now" in page
    vault = await full.operator.words("/vaults/acme/v1")
    assert "Validators pending 0" in vault
    assert "Nothing was funded or claimed on the last 30 days." in vault  # the sample is older
    owner = await full.operator.words("/vaults/acme")
    assert "key-1 ours manage 10.0.0.0/8" in owner
    assert "never valid SHA256:x" in owner
    uses = KeyUses(database)
    uses.note("key-1", 1_800_000_000.0)
    await uses.save()
    assert "2027-01-15 08:00:00 valid SHA256:x" in await full.operator.words("/vaults/acme")


async def test_amounts_of_a_vault_are_shown_by_day(full: Sample) -> None:
    database = full.operator.database
    async with database.transaction() as connection:
        now_ms = int((await connection.fetchval("select db_now()")).timestamp() * 1000)
    await change(database, "update events set created_at_ms = $1", now_ms)
    answer = await full.operator.read("/vaults/acme/v1")
    assert [cell.text for cell in answer.page.findall(".//tbody/tr/td")][1:] == ["2", "2", "2", "1"]
    chart = answer.page.find(f".//figure/{SVG}svg")
    assert len(chart.findall(f"{SVG}g")) == 30
    assert [rect.get("class") for rect in chart.iter(f"{SVG}rect")] == ["funded", "claimed"]


async def test_nothing_from_outside_is_markup(postgres18: ServerAddress) -> None:
    async with sample(postgres18) as found:
        await add_markup(found.operator.database)
        listed = await found.operator.read("/events")
        (link,) = [
            a.get("href")
            for a in listed.page.iter("a")
            if "script" in (a.get("href") or "") and "/events/" in a.get("href")
        ]
        event = await found.operator.read(link)
        assert event.page.find(".//pre").text == XSS
        for path in ("/webhooks", f"/webhooks/{found.failing.id}", "/vaults", "/vaults/acme"):
            assert XSS in (await found.operator.read(path)).words, path
        query = quote(XSS)
        for path in (f"/events?account={query}&vault={query}&id={query}", f"/webhooks?text={query}&account={query}"):
            answer = await found.operator.read(path)
            assert answer.field("account") == XSS


async def test_markup_would_be_noticed(empty: Operator) -> None:
    text = (await empty.read("/events")).text.replace("</main>", f"<p title='{XSS}'>{XSS}</p></main>")
    page = html5lib.parse(text, namespaceHTMLElements=False)
    assert injected(page) == ["img", "img onerror", "script None"]
