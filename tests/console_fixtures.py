"""The console on a real socket, with browsers that are logged in by a link, as `vaultevents console` prints it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import html5lib
from yarl import URL

from store_factories import KEY
from vaultevents import config
from vaultevents.api.server import bind, serve, url_of
from vaultevents.console.app import build
from vaultevents.console.checks import Check, CheckRunner
from vaultevents.console.context import ConsoleContext
from vaultevents.console.sessions import new_link
from vaultevents.daemon import console_options
from vaultevents.store.clock import ServiceClock
from vaultevents.store.pool import Database
from vaultevents.wiring.sources import open_sources


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. `page`: the parsed document, which must have no error of syntax."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def page(self) -> Any:
        return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(self.text)

    @property
    def words(self) -> str:
        """The text of the page as it is read."""
        return " ".join("".join(self.page.find("body").itertext()).split())

    def field(self, name: str) -> str:
        """The value of the first input with this name."""
        value: str = self.page.find(f".//input[@name='{name}']").get("value")
        return value


@dataclass(frozen=True, slots=True)
class Browser:
    """A browser with cookies of its own."""

    url: str
    session: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=dict)

    async def get(self, path: str, **headers: str) -> Answer:
        return await self._send("GET", path, None, headers)

    async def post(self, path: str, fields: Mapping[str, str], **headers: str) -> Answer:
        """Post a form as a page of the console does."""
        return await self._send("POST", path, fields, {"Origin": self.url, "Sec-Fetch-Site": "same-origin"} | headers)

    async def submit(self, path: str, fields: Mapping[str, str]) -> Answer:
        """Post a form with the token of this session."""
        token = (await self.get("/configuration")).field("csrf")
        return await self.post(path, {"csrf": token, **fields})

    async def _send(
        self, method: str, path: str, fields: Mapping[str, str] | None, headers: Mapping[str, str]
    ) -> Answer:
        sent = {name: value for name, value in ({**self.headers, **headers}).items() if value}
        async with self.session.request(
            method, URL(self.url + path, encoded=True), data=fields, headers=sent, allow_redirects=False
        ) as answer:
            return Answer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.text())


@dataclass(frozen=True, slots=True)
class ConsoleServer:
    """A running console."""

    url: str
    context: ConsoleContext

    @asynccontextmanager
    async def stranger(self) -> AsyncIterator[Browser]:
        """A browser that is not logged in."""
        jar = aiohttp.CookieJar(unsafe=True)  # cookies of IP addresses
        connector = aiohttp.TCPConnector(force_close=True)  # a connection pauses after what was refused
        async with aiohttp.ClientSession(cookie_jar=jar, connector=connector) as session:
            yield Browser(self.url, session)

    async def code(self) -> str:
        """The code of a new link."""
        return (await new_link(self.context.database, self.url)).url.partition("#")[2]

    @asynccontextmanager
    async def browser(self) -> AsyncIterator[Browser]:
        """A browser that is logged in."""
        async with self.stranger() as browser:
            answer = await browser.post("/login", {"code": await self.code()})
            assert (answer.status, answer.headers["location"]) == (303, "/"), answer.text
            yield browser


@asynccontextmanager
async def running_console(
    database: Database,
    *,
    check: Check | None = None,
    safe_block: int | None = None,
    chain_clock: ServiceClock | None = None,
    **values: Any,
) -> AsyncIterator[ConsoleServer]:
    """The console as the daemon builds it, on a free port of loopback; `values` are further settings."""
    console = {"port": 0, **values.pop("console", {})}
    settings = config.given({"network": "devnet", "chain_id": 1337, "console": console, **values}, "test")
    options, stop = console_options(settings), asyncio.Event()
    listener = bind(options)
    url = url_of(listener, options)
    clock = chain_clock or ServiceClock(await database.now())
    runner = None if check is None else CheckRunner(check, settings, time.time)
    context = ConsoleContext(
        database,
        settings,
        KEY,
        time.time,
        stop,
        runner,
        lambda: safe_block,
        sources=partial(open_sources, settings, database, clock, without_beacon=True),
        chain_behind_s=lambda: time.time() - clock.now().timestamp(),
    )
    serving = asyncio.create_task(serve(build(context), listener, options, time.time, stop))
    try:
        yield ConsoleServer(url, context)
    finally:
        stop.set()
        await serving
        if runner is not None:
            await runner.close()
