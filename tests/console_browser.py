"""A browser that is logged in to the console."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from playwright.async_api import Browser

from browser_fixtures import watched_page
from console_fixtures import ConsoleServer


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """A running console and the cookies of a browser that is logged in."""

    server: ConsoleServer
    state: Any

    @property
    def url(self) -> str:
        return self.server.url


async def log_in(browser: Browser, server: ConsoleServer) -> LoggedIn:
    """Log in with a new link."""
    async with watched_page(browser, server.url) as watched:
        await watched.page.goto(f"{server.url}/login#{await server.code()}")
        await watched.page.wait_for_url(f"{server.url}/")
        assert watched.problems == []
        return LoggedIn(server, await watched.page.context.storage_state())
