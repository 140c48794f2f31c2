"""Who gets in: links that are good once, cookies, forms, hosts and origins."""

from __future__ import annotations

import pytest

from console_fixtures import running_console
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration


async def test_a_link_logs_in_once(database: Database) -> None:
    async with running_console(database) as console, console.stranger() as browser, console.stranger() as other:
        code = await console.code()
        assert (await browser.get("/")).headers["location"] == "/login"
        shown = await browser.get("/login")
        assert "vaultevents console" in shown.words
        answer = await browser.post("/login", {"code": code})
        assert (answer.status, answer.headers["location"]) == (303, "/")
        assert "Overview" in (await browser.get("/")).words
        used = await other.post("/login", {"code": code})
        assert used.status == 403
        assert "Run 'vaultevents console' again" in used.words
