"""webhook enable, pause and test as an operator uses them beside a running service."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from command_line import place
from timeouts import until
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.e2e


async def test_an_operator_pauses_tests_and_enables(tmp_path: Path, data_dir: Path, server: ServerAddress) -> None:
    async with place(tmp_path, data_dir, Simulation(4)) as here:
        (account_id, hook), *_ = sorted((await here.subscribed()).items())
        webhook_id = f"wh-{account_id}-{here.schema}"
        running = await here.shell.start("run")
        await running.said('"started"')
        paused, malformed, unknown = await asyncio.gather(
            here.run("webhook", "pause", webhook_id),
            here.run("webhook", "pause", webhook_id, "--for", "soon"),
            here.run("webhook", "enable", "wh-nobody"),
        )
        assert paused.ok().stdout == f"Webhook {webhook_id} of account {account_id} is paused until 'enable'.\n"
        assert malformed.error == "--for 'soon' is not a time: write 1s to 30d, as in 2h"
        assert unknown.error == "there is no webhook 'wh-nobody': 'vaultevents webhook list ACCOUNT' shows them"
        waiting, listed = await asyncio.gather(
            here.run("webhook", "test", webhook_id, "--wait", "0.3"), here.run("webhook", "list", account_id)
        )
        assert waiting.code == 1
        assert "was not sent within 0.3 s: see that 'vaultevents run' runs" in waiting.stdout
        assert "paused until 'enable'" in listed.ok().stdout
        enabled = (await here.run("webhook", "enable", webhook_id, "--json")).ok().json
        assert (enabled["active"], enabled["disabledReason"], enabled["pausedUntil"]) == (True, None, None)
        await until(lambda: len(hook.ledger) == 1)
        done = (await here.run("webhook", "test", webhook_id, "--json")).ok().json
        assert (done["accepted"], done["answer"]["status"], done["answer"]["error"]) == (True, 200, None)
        assert hook.ledger[-1].webhook_id == done["id"]
        (await running.end()).ok()
