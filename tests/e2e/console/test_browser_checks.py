"""The checks of the browser tests report what they look for: a negative control for each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Route

import browser_fixtures
from browser_fixtures import (
    COLOUR_RULES,
    WatchedPage,
    inaccessible,
    injected,
    overflowing,
    running_browser,
    unreachable,
    watched_page,
)
from xss_corpus import XSS_GROUPS, XSS_STRINGS, careless_page, joined

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

ORIGIN = "http://console.test"

GOOD = """<!doctype html><html lang=en><title>Good</title><meta name=viewport content="width=device-width">
<main><h1>Good</h1><p>Text.</p><a href=/>Home</a> <label>Name <input name=name></label> <button>Send</button></main>"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as browser:
        yield browser


async def show(watched: WatchedPage, document: str, headers: dict[str, str] | None = None) -> None:
    """Load a document as if the origin had sent it."""

    async def fulfil(route: Route) -> None:
        if route.request.url == f"{ORIGIN}/":
            await route.fulfill(status=200, content_type="text/html", body=document, headers=headers)
        else:
            await route.fulfill(status=204)

    await watched.page.route("**/*", fulfil)
    await watched.page.goto(f"{ORIGIN}/")


async def test_a_good_page_has_no_findings(browser: Browser) -> None:
    async with watched_page(browser, ORIGIN, width=360) as watched:
        await show(watched, GOOD)
        assert await overflowing(watched.page) == []
        assert await inaccessible(watched.page) == []
        assert await unreachable(watched.page) == []
        assert await injected(watched.page) == []
        assert watched.problems == []


@pytest.mark.parametrize(
    ("markup", "problem"),
    [
        ("<script>console.warn('old')</script>", "console warning: old"),
        ("<script>absent()</script>", "error: absent is not defined"),
        ("<img src=//other.test/x.png alt=x>", "request to another origin: http://other.test/x.png"),
        ("<script>alert('seen')</script>", "dialog: seen"),
    ],
)
async def test_what_a_page_does_wrong_is_reported(browser: Browser, markup: str, problem: str) -> None:
    async with watched_page(browser, ORIGIN) as watched:
        await show(watched, GOOD + markup)
        assert watched.problems == [problem]


async def test_what_the_content_security_policy_stops_is_reported(browser: Browser) -> None:
    async with watched_page(browser, ORIGIN) as watched:
        await show(watched, f"{GOOD}<script>1</script>", {"content-security-policy": "default-src 'none'"})
        assert [problem for problem in watched.problems if "Content Security Policy" in problem]


async def test_a_page_that_is_too_wide_is_reported(browser: Browser) -> None:
    async with watched_page(browser, ORIGIN, width=360) as watched:
        await show(watched, f"{GOOD}<div style=overflow-x:auto><p style=width:900px>scrolls in its box</p></div>")
        assert await overflowing(watched.page) == []
        await show(watched, f"{GOOD}<p style=width:400px>too wide</p>")
        assert await overflowing(watched.page) == ['<p style="width:400px">too wide</p> ends at 408 of 360']


async def test_an_inaccessible_page_is_reported(browser: Browser) -> None:
    async with watched_page(browser, ORIGIN) as watched:
        await show(watched, f"{GOOD}<p style=color:#bbb;background:#fff>pale</p><button></button>")
        assert [finding.split(":")[0] for finding in await inaccessible(watched.page, *COLOUR_RULES)] == [
            "serious color-contrast"
        ]
        findings = await inaccessible(watched.page)
        assert [finding.split(":")[0] for finding in findings] == [
            "critical button-name",
            "serious color-contrast",
        ]


@pytest.mark.parametrize(
    ("markup", "problem"),
    [
        ("<a href=/y style=outline:none>y</a>", "focus is not visible: <a "),
        ("<a href=/z style=position:absolute;left:-999px>z</a>", "focus is outside of the window: <a "),
        ("<a href=/t>t</a><script>onkeydown = () => false</script>", "Tab does not reach <a "),
    ],
)
async def test_a_field_that_keys_do_not_reach_is_reported(browser: Browser, markup: str, problem: str) -> None:
    async with watched_page(browser, ORIGIN) as watched:
        await show(watched, GOOD + markup)
        assert [finding for finding in await unreachable(watched.page) if finding.startswith(problem)]


async def test_a_missing_browser_is_a_reason_to_skip_and_a_failure_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(browser_fixtures, "UNPACKED", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no Chromium was found: .*dev\.py test"):
        browser_fixtures.chromium_path()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no Chromium was found"):
        browser_fixtures.chromium_path()


async def test_each_string_of_the_corpus_is_seen_where_a_page_does_not_escape_it(browser: Browser) -> None:
    assert len(XSS_STRINGS) == len(set(XSS_STRINGS)) == 40
    executed = 0
    async with watched_page(browser, ORIGIN) as watched:
        for place, text in [*XSS_STRINGS, *((group[0][0], joined(group)) for group in XSS_GROUPS)]:
            await watched.page.unroute_all()
            await show(watched, careless_page(place, text))
            found = await injected(watched.page)
            assert found, (place, text)
            executed += "a script was executed" in found
    assert executed >= 30  # the rest waits for a click, or for an error after loading
