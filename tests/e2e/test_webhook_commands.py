"""webhook enable, pause and test as an operator uses them, beside a running service and without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from command_line import Place, asking, place
from patience import until
from vaultevents.devnet.world import World
from vaultevents.store.embedded import ServerAddress

pytestmark = pytest.mark.e2e


@pytest.fixture
async def here(tmp_path: Path, data_dir: Path, server: ServerAddress) -> AsyncIterator[Place]:
    async with place(tmp_path, data_dir, World(4)) as found:
        yield found


async def test_pause_and_enable(here: Place, server: ServerAddress) -> None:
    account_id = sorted(await here.subscribed())[0]
    webhook_id = f"wh-{account_id}-{here.schema}"
    for_a_while = (await here.run("webhook", "pause", webhook_id, "--for", "2h", "--json")).ok().json
    end = datetime.fromisoformat(for_a_while["pausedUntil"])
    assert timedelta(hours=1) < end - datetime.now(UTC) < timedelta(hours=3)
    assert for_a_while["active"] is True
    assert "is paused until 'enable'" in (await here.run("webhook", "pause", webhook_id)).ok().stdout
    assert "paused until 'enable'" in (await here.run("webhook", "list", account_id)).ok().stdout
    async with asking(server, here.schema) as connection:
        await connection.execute("update webhooks set active = false, disabled_reason = 'gone', failures = 7")
        unknown, off, malformed = await asyncio.gather(
            here.run("webhook", "enable", "wh-nobody"),
            here.run("webhook", "pause", webhook_id),
            here.run("webhook", "pause", webhook_id, "--for", "soon"),
        )
        assert unknown.error == "there is no webhook 'wh-nobody': 'vaultevents webhook list ACCOUNT' shows them"
        assert off.error.endswith(f"'vaultevents webhook enable {webhook_id}' switches it on")
        assert malformed.error == "--for 'soon' is not a time: write 1s to 30d, as in 2h"
        enabled = (await here.run("webhook", "enable", webhook_id, "--json")).ok().json
        assert (enabled["active"], enabled["disabledReason"], enabled["pausedUntil"]) == (True, None, None)
        row = await connection.fetchrow("select failures, paused_until from webhooks where id = $1", webhook_id)
        assert tuple(row) == (0, None)
        assert await connection.fetchval("select count(*) from notices where kind = 'webhook_enabled'") > 0


async def test_a_test_shows_the_answer(here: Place) -> None:
    hooks = await here.subscribed()
    account_id = sorted(hooks)[0]
    webhook_id = f"wh-{account_id}-{here.schema}"
    alone = await here.run("webhook", "test", webhook_id, "--wait", "0.3")
    assert alone.code == 1
    assert "was not sent within 0.3 s: see that 'vaultevents run' runs" in alone.stdout
    running = await here.shell.start("run")
    await until(lambda: len(hooks[account_id].ledger) == 1)
    done = (await here.run("webhook", "test", webhook_id, "--json")).ok().json
    assert (done["accepted"], done["answer"]["status"], done["answer"]["error"]) == (True, 200, None)
    assert hooks[account_id].ledger[-1].webhook_id == done["id"]
    (await running.end()).ok()
