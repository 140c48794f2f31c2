"""A receiver beside the service: a webhook of an account that exists only while the service runs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from vaultevents.cli.terminal import say
from vaultevents.config import Settings
from vaultevents.core.errors import InputError
from vaultevents.core.sealing import NONCE_BYTES, Secret
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.core.webhooks import Webhook, check_url
from vaultevents.devnet.receivers import Hook, Received, Receivers
from vaultevents.store import webhooks
from vaultevents.wiring.database import open_store
from vaultevents.wiring.delivery import url_rules


@asynccontextmanager
async def receiving(settings: Settings, account_id: str, show: Callable[[Received], None]) -> AsyncIterator[Settings]:
    """Receive the events of an account on a free port of loopback, and give `show` each of them.

    Yields the settings with which the service trusts the receiver. The webhook is removed at the end. Raises
    `InputError` where webhooks may not reach loopback, or trust another authority.
    """
    if settings.delivery.ca_file is not None:
        raise InputError(
            "--listen brings an authority of its own: remove delivery.ca_file, or use 'vaultevents listen'"
        )
    directory = settings.directory / "receiver"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    receivers = Receivers(directory)
    try:
        await receivers.start()
        hook = receivers.hook("hook")
        url = check_url(hook.url, url_rules(settings))
        webhook = Webhook(f"wh-{secrets.token_hex(12)}", account_id, url, None, None, active=True)
        secret = Secret(new_secret(secrets.token_bytes(SECRET_BYTES)))
        hook.secret = secret.reveal()
        async with open_store(settings) as store:
            await webhooks.create_webhook(store.database, webhook, secret, store.key, secrets.token_bytes(NONCE_BYTES))
            try:
                say(f"Listening at {url} for account {account_id}, as webhook {webhook.id}.")
                showing = asyncio.create_task(show_all(hook, show))
                delivery = settings.delivery.model_copy(update={"ca_file": receivers.ca_path})
                try:
                    yield settings.model_copy(update={"delivery": delivery})
                finally:
                    showing.cancel()
                    await asyncio.gather(showing, return_exceptions=True)
            finally:
                await webhooks.delete_webhook(store.database, account_id, webhook.id)
    finally:
        await receivers.stop()


async def show_all(hook: Hook, show: Callable[[Received], None]) -> None:
    """Give `show` what arrives, in order, until cancelled."""
    shown = 0
    while True:
        for received in (await hook.arrivals(shown + 1, timeout_s=float("inf")))[shown:]:
            show(received)
            shown += 1


def show_received(received: Received) -> None:
    """Print a webhook, and whether its signature verifies."""
    say(f"{'verified' if received.verified else 'DOES NOT VERIFY'}: {received.body.decode(errors='replace')}")
