"""A customer tries his receiver while the daemon is killed with -9: what was in flight is sent once more, in order."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from api_fixtures import key_pair, public_pem
from command_line import Place, Running, place
from timeouts import WAIT_TIMEOUT_S
from vaultevents.devnet.receivers import Hang, Hook, Reply, always
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.fault

LEASE_S = 3.0


async def started(here: Place) -> tuple[Running, str]:
    """A daemon with all its workers, and where its API is."""
    daemon = await here.shell.start("run")
    await daemon.said("api_listens")
    lines = [json.loads(line) for line in daemon.stderr_so_far.splitlines() if line.startswith("{")]
    (url,) = [line["url"] for line in lines if line["event"] == "api_listens"]
    return daemon, url


async def asked(here: Place, url: str, api_key: str, *arguments: str) -> Any:
    environment = {"VAULTEVENTS_API_URL": url, "VAULTEVENTS_API_KEY": api_key}
    done = await here.run("call", *arguments, "--private-key", "private.pem", "--json", **environment)
    return done.ok().json["body"]


async def arrivals(hook: Hook, event_id: str, number: int) -> None:
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while sum(request.webhook_id == event_id for request in hook.ledger) < number:
            await asyncio.sleep(0.02)


async def test_what_a_killed_daemon_was_resending_is_sent_once_more(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with place(tmp_path, tmp_path_factory.mktemp("data"), Simulation(7)) as here:
        here.configure(delivery=f"timeout_s = 2\nconnect_timeout_s = 1\nlease_s = {LEASE_S}")
        hooks = await here.subscribed()
        account_id, hook = next(iter(hooks.items()))
        private = key_pair().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (here.home / "private.pem").write_bytes(private)
        (here.home / "public.pem").write_bytes(public_pem(key_pair()))
        key = ("key", "add", "--account", account_id, "--public-key", "public.pem", "--role", "manage", "--json")
        api_key = (await here.run(*key)).ok().json["apiKey"]
        webhook = f"/v1/account/webhooks/wh-{account_id}-{here.schema}"

        daemon, url = await started(here)
        tested = await asked(here, url, api_key, "POST", f"{webhook}/test")
        await arrivals(hook, tested["id"], 1)
        hook.behaviour = always(Hang())
        lost = await asked(here, url, api_key, "POST", f"{webhook}/test")
        await arrivals(hook, lost["id"], 1)
        await daemon.end(signal.SIGKILL)

        hook.behaviour = always(Reply())
        daemon, url = await started(here)
        await arrivals(hook, lost["id"], 2)
        await asyncio.sleep(LEASE_S)
        (await daemon.end()).ok()
        counts = [
            sum(request.webhook_id == event_id for request in hook.ledger) for event_id in (tested["id"], lost["id"])
        ]
        assert counts == [1, 2]
        assert all(request.verified for request in hook.ledger)
        (await here.run("audit", "deliveries")).ok()
