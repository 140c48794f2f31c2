"""A console with a logged-in browser, and what its pages of events, webhooks and vaults show."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from console_fixtures import Answer, Browser, running_console
from console_nodes import Nodes
from store_factories import (
    Subscription,
    account,
    change,
    claimed,
    commit,
    funding,
    live_at,
    own_database,
    take,
    vault,
    webhook,
)
from vaultevents.config import Settings
from vaultevents.core.timing import Timing
from vaultevents.store.deliveries import Delivery, Settlement, settle
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import ServerAddress

XSS = """"><script>alert(1)</script><img src=x onerror=alert(1)>' {{7*7}}&lt;"""


SVG = "{http://www.w3.org/2000/svg}"
FOREIGN = ("img", "iframe", "style", "object", "base")


@dataclass(frozen=True, slots=True)
class Operator:
    """A browser that is logged in to the console of a database."""

    database: Database
    browser: Browser
    settings: Settings

    async def read(self, path: str, status: int = 200) -> Answer:
        """Load a page and check that it is one of the console, in which nothing of a customer is markup."""
        answer = await self.browser.get(path)
        assert answer.status == status, answer.text
        assert answer.page.find(".//nav") is not None
        assert injected(answer.page) == []
        return answer

    async def words(self, path: str) -> str:
        """Load a page and return its text, with a space between its elements."""
        return spaced((await self.read(path)).page)

    async def submit(self, path: str, fields: Mapping[str, str], status: int = 303) -> Answer:
        """Post a form with the token of this session; return the answer."""
        token = (await self.browser.get("/events")).field("csrf")
        answer = await self.browser.post(path, {"csrf": token, **fields})
        assert answer.status == status, answer.text
        return answer

    async def follow(self, path: str, fields: Mapping[str, str]) -> Answer:
        """Post a form and load the page to which it leads."""
        return await self.read((await self.submit(path, fields)).headers["location"])


def spaced(page: Any) -> str:
    """The text of a page, with a space between its elements."""
    return " ".join(" ".join(page.find("body").itertext()).split())


def injected(page: Any) -> list[str]:
    """What of a page no template of the console has: images, foreign scripts, handlers of events, inline styles."""
    found = [element.tag for element in page.iter() if element.tag in FOREIGN]
    for element in page.iter():
        found += [f"{element.tag} {name}" for name in element.attrib if name.startswith("on") or name == "style"]
    return found + [f"script {script.get('src')}" for script in page.iter("script") if not script.get("src")]


@asynccontextmanager
async def operator(database: Database, nodes: Nodes | None = None) -> AsyncIterator[Operator]:
    """Run the console of a database, over `nodes` if there are some, and log in."""
    clock, settings = (None, {}) if nodes is None else (nodes.clock, nodes.settings)
    async with running_console(database, chain_clock=clock, **settings) as console, console.browser() as browser:
        yield Operator(database, browser, console.context.settings)


@dataclass(frozen=True, slots=True)
class Sample:
    """The account `acme` with the vault `v1`, and a webhook that fails; `sound` is one that works."""

    operator: Operator
    outbox: Outbox
    failing: Subscription
    sound: Subscription


@asynccontextmanager
async def sample(server: ServerAddress, nodes: Nodes | None = None) -> AsyncIterator[Sample]:
    """Two fundings and a claim, each delivered to one webhook and refused by the other with markup."""
    async with own_database(server) as database:
        await account(database)
        await vault(database, queue="q1", first_block=1)
        outbox = await live_at(database, 0)
        failing = await webhook(database, url="https://failing.example/hook")
        sound = await webhook(database, url="https://sound.example/hook", event_types=["funding_received"])
        await commit(outbox, funding(1), funding(2), claimed(7, amount_wei=2 * 10**18))
        await settle(database, [_answered(delivery, failing.id) for delivery in (await take(database)).deliveries])
        async with operator(database, nodes) as found:
            yield Sample(found, outbox, failing, sound)


def _answered(delivery: Delivery, failing_id: str) -> Settlement:
    timing = Timing(dns_ms=10, connect_ms=20, tls_ms=30, first_byte_ms=90)
    now = datetime.now(UTC)
    if delivery.webhook_id == failing_id:
        return Settlement(delivery, "scheduled", now, 100, 404, None, XSS, "192.0.2.7", after_s=300, timing=timing)
    return Settlement(delivery, "delivered", now, 100, 200, None, "ok", "192.0.2.8", timing=timing)


async def add_markup(database: Database) -> None:
    """Put markup into everything that comes from outside, past the checks of the registration."""
    await change(database, "update accounts set name = $1", XSS)
    await change(database, "update webhooks set url = $1", f"https://a.example/{XSS}")
    await change(database, "update events set vault_id = $1, body = convert_to($2, 'UTF8') where seq = 1", XSS, XSS)
    await change(database, "update events set id = $1 where seq = 1", f"funding_received_acme_{XSS}/../?#")
