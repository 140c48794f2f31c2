"""The console in a real browser: every page is readable, quiet, reachable by keys, and executes nothing of a customer.

The pages are those of the navigation and one of each kind that they link to, so that a new page is tested unasked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from urllib.parse import quote, urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from browser_fixtures import (
    COLOUR_RULES,
    HEIGHT,
    WIDTHS,
    inaccessible,
    injected,
    links,
    overflowing,
    running_browser,
    unreachable,
    watched_page,
)
from console_browser import LoggedIn, log_in
from console_fixtures import ConsoleServer, running_console
from console_rows import hostile_event, hostile_rows, usual_rows
from store_factories import own_database
from timeouts import until
from vaultevents.config import Settings
from vaultevents.console.navigation import PAGES
from vaultevents.core.findings import Finding, failed, passed, warned
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import ServerAddress
from xss_corpus import XSS_GROUPS, XSS_STRINGS, joined

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

TEXTS = [text for _, text in XSS_STRINGS]
JOINED = [joined(group) for group in XSS_GROUPS]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as browser:
        yield browser


@asynccontextmanager
async def checked_console(database: Database, findings: Sequence[Finding]) -> AsyncIterator[ConsoleServer]:
    """A console whose page of the configuration shows these findings."""

    async def check(settings: Settings, advanced: Callable[[int, int], None]) -> Sequence[Finding]:
        return findings

    async with running_console(database, check=check) as server:
        runner = server.context.check
        assert runner is not None
        runner.start()
        await until(lambda: runner.result is not None)
        yield server


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def console(browser: Browser, postgres18: ServerAddress) -> AsyncIterator[LoggedIn]:
    async with own_database(postgres18) as database:
        await usual_rows(database)
        node = failed("node https://node.example#1", "HTTP status 503", "Name another one")
        findings = (passed("disk", "1,000 MiB are free"), node, warned("database clock", "it is 2.5 s behind"))
        async with checked_console(database, findings) as server:
            yield await log_in(browser, server)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def hostile(browser: Browser, postgres18: ServerAddress) -> AsyncIterator[LoggedIn]:
    async with own_database(postgres18) as database:
        await hostile_rows(database, JOINED)
        async with checked_console(database, [failed(text, text, text) for text in JOINED]) as server:
            yield await log_in(browser, server)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def paths(browser: Browser, console: LoggedIn) -> list[str]:
    """The pages of the navigation, and the first of each kind that they link to."""
    found = {kind(page.path): page.path for page in PAGES}
    async with watched_page(browser, console.url, state=console.state) as watched:
        waiting = list(found.values())
        while waiting:
            await watched.page.goto(console.url + waiting.pop(0))
            for path in await links(watched.page):
                if kind(path) not in found:
                    found[kind(path)] = path
                    waiting.append(path)
    return list(found.values())


def kind(path: str) -> tuple[str, int]:
    """What two pages have in common that differ only in what they show: the first and the number of segments."""
    segments = urlsplit(path).path.strip("/").split("/")
    return segments[0], len(segments)


async def test_pages_of_one_kind_are_recognised() -> None:
    assert kind("/events/acme/e-1") == kind("/events/borealis/e-2") != kind("/events")
    assert kind("/events?before=2") == kind("/events")
    assert kind("/events/acme") != kind("/webhooks/acme")


async def test_a_link_logs_in_once_and_stays_in_no_history(browser: Browser, console: LoggedIn) -> None:
    link = f"{console.url}/login#{await console.server.code()}"
    async with watched_page(browser, console.url) as watched:
        page = watched.page
        await page.goto(link)
        await page.wait_for_url(f"{console.url}/")
        assert await page.get_by_role("navigation").get_by_role("link").count() == len(PAGES)
        await page.get_by_role("button", name="Log out").click()
        await page.wait_for_url(f"{console.url}/login")
        watched.expected.add("a status of 403 ")
        await page.goto("about:blank")
        await page.goto(link)
        await page.get_by_role("alert").wait_for()
        assert "#" not in page.url
        assert await inaccessible(page) == []
        assert watched.problems == []


async def test_a_link_that_is_pasted_logs_in_without_javascript(browser: Browser, console: LoggedIn) -> None:
    async with watched_page(browser, console.url, javascript=False) as watched:
        page = watched.page
        await page.goto(console.url)
        await page.get_by_label("Link").fill(f"{console.url}/login#{await console.server.code()}")
        await page.get_by_role("button", name="Log in").click()
        await page.wait_for_url(f"{console.url}/")
        assert watched.problems == []


async def test_every_page_fits_and_is_accessible(browser: Browser, console: LoggedIn, paths: list[str]) -> None:
    found: dict[str, list[str]] = {}
    for path in paths:
        async with watched_page(browser, console.url, state=console.state) as watched:
            page = watched.page
            response = await page.goto(console.url + path)
            assert response is not None and response.status == 200, path
            for width in WIDTHS:
                await page.set_viewport_size({"width": width, "height": HEIGHT})
                found[f"{path} at {width}"] = await overflowing(page)
                await page.emulate_media(color_scheme="light")
                found[f"{path} at {width}, light"] = await inaccessible(page)
                await page.emulate_media(color_scheme="dark")
                found[f"{path} at {width}, dark"] = await inaccessible(page, *COLOUR_RULES)
            found[path] = watched.problems
    assert {page: problems for page, problems in found.items() if problems} == {}


async def test_keys_reach_all_of_every_page(browser: Browser, console: LoggedIn, paths: list[str]) -> None:
    found: dict[str, list[str]] = {}
    for width in WIDTHS:
        async with watched_page(browser, console.url, state=console.state, width=width) as watched:
            for path in paths:
                await watched.page.goto(console.url + path)
                found[f"{path} at {width}"] = await unreachable(watched.page)
    assert {page: problems for page, problems in found.items() if problems} == {}


async def test_every_page_works_without_javascript(browser: Browser, console: LoggedIn, paths: list[str]) -> None:
    async with (
        watched_page(browser, console.url, state=console.state) as scripted,
        watched_page(browser, console.url, state=console.state, javascript=False) as plain,
    ):
        for path in paths:
            await scripted.page.goto(console.url + path)
            await plain.page.goto(console.url + path)
            headings = [await page.locator("h1, h2, th").all_inner_texts() for page in (scripted.page, plain.page)]
            assert headings[0] and headings[0] == headings[1], path
        assert plain.problems == []


async def test_no_stored_string_is_executed(browser: Browser, hostile: LoggedIn) -> None:
    async with watched_page(browser, hostile.url, state=hostile.state) as watched:
        watched.expected.add("a status of 404 ")  # of ids with a slash, which no route has
        page, shown, checked, seen = watched.page, set[str](), set[str](), {page.path for page in PAGES}
        waiting = sorted(seen)
        while waiting:
            path = waiting.pop(0)
            await page.goto(hostile.url + path)
            assert await injected(page) == [], path
            text = await page.locator("body").inner_text()
            found = {string for string in TEXTS if squeezed(string) in squeezed(text)}
            if path == "/configuration":  # where the findings of the check have every string
                checked = found
            else:
                shown |= found
            if len(urlsplit(path).path.strip("/").split("/")) == 1:  # what a page of a list links to
                new = [link for link in await links(page) if link not in seen]
                seen |= set(new)
                waiting += new
        assert shown == checked == set(TEXTS)
        assert watched.problems == []


def squeezed(text: str) -> str:
    return "".join(text.split())


async def test_no_string_that_arrives_while_a_page_is_open_is_executed(browser: Browser, hostile: LoggedIn) -> None:
    async with watched_page(browser, hostile.url, state=hostile.state) as watched:
        await watched.page.goto(hostile.url)
        text = "live <img src=x onerror=window.xss=1>"
        await hostile_event(hostile.server.context.database, text)
        await watched.page.get_by_text(text).first.wait_for()
        assert await injected(watched.page) == []
        assert watched.problems == []


async def test_no_string_in_an_address_is_executed(browser: Browser, hostile: LoggedIn) -> None:
    async with watched_page(browser, hostile.url, state=hostile.state) as watched:
        watched.expected |= {"a status of 400 ", "a status of 404 ", "does not conform to the required format"}
        page = watched.page
        forms: dict[str, list[str]] = {}
        for path in [page.path for page in PAGES]:
            await page.goto(hostile.url + path)
            fields = await page.locator("form[method=get] input[name], form[method=get] select[name]").evaluate_all(
                "fields => fields.map((field) => field.name)"
            )
            forms |= {path: fields} if fields else {}
        for text in JOINED:
            value = quote(text, safe="")
            queries = [f"{path}?{'&'.join(f'{name}={value}' for name in names)}" for path, names in forms.items()]
            for address in (f"/{value}", *queries):
                await page.goto(hostile.url + address)
                assert await injected(page) == [], address
        assert watched.problems == []
