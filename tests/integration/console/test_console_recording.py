"""Every form of the console that changes something leaves exactly one entry in the audit log.

The forms are the routes of the console itself, so that a new one is tested unasked: without an act here it is reported.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from starlette.routing import Route

from console_fixtures import Browser, ConsoleServer, running_console
from console_nodes import running_nodes
from store_factories import change, commit, funding, own_database, rows, simple_simulation, values, webhook
from vaultevents.console.access import Guard
from vaultevents.console.app import build
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.store.webhooks import disable_webhook

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

READ_UP_TO = 40


@dataclass(frozen=True, slots=True)
class Scene:
    """A console over a chain, its routes, a browser that is logged in, and a stranger."""

    server: ConsoleServer
    routes: list[Route]
    browser: Browser
    stranger: Browser

    @property
    def database(self) -> Database:
        return self.server.context.database


@dataclass(frozen=True, slots=True)
class Form:
    """What a browser posts."""

    browser: Browser
    path: str
    fields: Mapping[str, str] = field(default_factory=dict)


Act = Callable[[Scene], Awaitable[Form]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(postgres18: ServerAddress) -> AsyncIterator[Scene]:
    async with running_nodes(READ_UP_TO + 10, 10) as nodes, own_database(postgres18) as database:
        outbox: Outbox = await simple_simulation(database)
        await webhook(database)
        await commit(outbox, funding(1))
        await change(database, "update cursors set position = $1 where kind = 'live'", READ_UP_TO)
        async with (
            running_console(database, chain_clock=nodes.clock, **nodes.settings) as server,
            server.browser() as browser,
            server.stranger() as stranger,
        ):
            guard = build(server.context)
            assert isinstance(guard, Guard)
            routes = [route for route in guard.routes if isinstance(route, Route)]
            assert len(routes) == len(guard.routes)
            yield Scene(server, routes, browser, stranger)


async def log_in(scene: Scene) -> Form:
    return Form(scene.stranger, "/login", {"code": await scene.server.code()})


async def log_out(scene: Scene) -> Form:
    await scene.stranger.post("/login", {"code": await scene.server.code()})
    return Form(scene.stranger, "/logout")


def on_webhook(action: str, **fields: str) -> Act:
    """An action on the webhook, which is switched off before."""

    async def prepare(scene: Scene) -> Form:
        (webhook_id,) = await values(scene.database, "select id from webhooks")
        if action == "enable":
            async with scene.database.transaction() as connection:
                await disable_webhook(connection, webhook_id, "gone")
        return Form(scene.browser, f"/webhooks/{webhook_id}/{action}", fields)

    return prepare


async def resend(scene: Scene) -> Form:
    (event_id,) = await values(scene.database, "select id from events")
    return await on_webhook("resend", event=event_id)(scene)


async def replay(scene: Scene) -> Form:
    return Form(scene.browser, "/replay", {"unit": "block", "first": "5", "last": "20"})


async def backfill(scene: Scene) -> Form:
    await change(scene.database, "update cursors set position = stop where kind = 'backfill'")
    return Form(scene.browser, "/vaults/acme/v1/backfill")


ACTS: Mapping[str, Act] = {
    "/login": log_in,
    "/logout": log_out,
    "/webhooks/{webhook_id}/enable": on_webhook("enable"),
    "/webhooks/{webhook_id}/pause": on_webhook("pause", lasting="1h"),
    "/webhooks/{webhook_id}/test": on_webhook("test"),
    "/webhooks/{webhook_id}/resend": resend,
    "/webhooks/{webhook_id}/recover": on_webhook("recover", since="2020-01-01T00:00"),
    "/webhooks/{webhook_id}/rotate-secret": on_webhook("rotate-secret", overlap="1h"),
    "/replay": replay,
    "/vaults/{account_id}/{vault_id}/backfill": backfill,
}


CHANGES_NOTHING = {"/configuration/check"}
"""A form that starts tests, which only read."""


async def wrongly_recorded(scene: Scene, routes: Iterable[Route], acts: Mapping[str, Act]) -> list[str]:
    """Do what each route with a form does; return those that left another number of entries than one."""
    wrong = []
    for path in forms(routes):
        if path not in acts:
            wrong.append(f"{path}: no act")
            continue
        form = await acts[path](scene)
        before = await number_of_entries(scene)
        fields = dict(form.fields)
        if path != "/login":
            fields["csrf"] = (await form.browser.get("/configuration")).field("csrf")
        answer = await form.browser.post(form.path, fields)
        assert answer.status in (200, 303), (path, answer.words)
        if (entries := await number_of_entries(scene) - before) != 1:
            wrong.append(f"{path}: {entries} entries")
    return wrong


def forms(routes: Iterable[Route]) -> list[str]:
    """The paths of the forms that change something."""
    return [route.path for route in routes if "POST" in (route.methods or ()) and route.path not in CHANGES_NOTHING]


async def number_of_entries(scene: Scene) -> int:
    (number,) = await values(scene.database, "select count(*)::int from audit_log")
    assert isinstance(number, int)
    return number


async def test_every_form_leaves_one_entry_by_who_posts_it(scene: Scene) -> None:
    assert await wrongly_recorded(scene, scene.routes, ACTS) == []
    assert {*forms(scene.routes)} == ACTS.keys()
    actors = await rows(scene.database, "select action, array_agg(distinct actor) as actors from audit_log group by 1")
    named = {row["action"]: row["actors"] for row in actors if row["action"] not in ("console.link", "console.login")}
    for action in ("console.logout", "stream.replay", "stream.backfill", "webhook.recover"):
        assert all(actor.startswith("console:cs-") for actor in named[action]), action


async def test_a_form_without_an_entry_or_without_an_act_is_seen(scene: Scene) -> None:
    async def ended(_: object) -> None: ...

    routes = [Route("/new", ended, methods=["POST"]), Route("/webhooks/{webhook_id}/enable", ended, methods=["POST"])]

    async def needless(scene: Scene) -> Form:
        """Switch on what is on."""
        form = await on_webhook("enable")(scene)
        await scene.browser.submit(form.path, {})
        return form

    found = await wrongly_recorded(scene, routes, {"/webhooks/{webhook_id}/enable": needless})
    assert found == ["/new: no act", "/webhooks/{webhook_id}/enable: 0 entries"]


async def test_a_login_instead_of_another_ends_that_one(scene: Scene) -> None:
    async with scene.server.browser() as browser:
        code = await scene.server.code()
        before = await number_of_entries(scene)
        await browser.post("/login", {"code": code})
        newest = await rows(
            scene.database, "select action, actor, subject from audit_log where seq > $1 order by seq", before
        )
    login, logout = newest
    assert (login["action"], login["actor"]) == ("console.login", "service")
    assert (logout["action"], logout["actor"]) == ("console.logout", f"console:{logout['subject']}")
    assert login["subject"] != logout["subject"]
