"""webhook: the URLs to which events are delivered, changed by the code that the HTTP API uses."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from vaultevents.cli.options import AccountArgument, ConfigOption, JsonOption, duration_of, overlap_of
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, put_table, say
from vaultevents.core.sealing import NONCE_BYTES, Secret
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.core.webhooks import Webhook, check_event_types, check_url
from vaultevents.store import resends, webhooks
from vaultevents.wiring.database import Store, open_store
from vaultevents.wiring.delivery import url_rules

webhook = typer.Typer(
    help="Add, list, pause, enable, test and remove the URLs to which events are delivered.", no_args_is_help=True
)

WebhookArgument = Annotated[
    str, typer.Argument(help="The webhook's id, as 'webhook list' shows it.", metavar="WEBHOOK")
]
ASK_EVERY_S = 0.2


@webhook.command("add")
def webhook_add(
    account_id: AccountArgument,
    url: Annotated[str, typer.Argument(help="https URL that receives the events.", metavar="URL")],
    event_type: Annotated[
        list[str] | None,
        typer.Option(help="Only events of this type, such as funding_received; may be repeated.", metavar="TYPE"),
    ] = None,
    vault_id: Annotated[
        list[str] | None,
        typer.Option("--vault", help="Only events of this vault; may be repeated.", metavar="VAULT"),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a webhook and show its signing secret, once."""
    settings = settings_of(config)
    added = Webhook(
        id=f"wh-{secrets.token_hex(12)}",
        account_id=account_id,
        url=check_url(url, url_rules(settings)),
        event_types=check_event_types(event_type or None),
        vault_ids=tuple(dict.fromkeys(vault_id)) if vault_id else None,
        active=True,
    )
    secret = Secret(new_secret(secrets.token_bytes(SECRET_BYTES)))

    async def work() -> None:
        async with open_store(settings) as store:
            nonce = secrets.token_bytes(NONCE_BYTES)
            await webhooks.create_webhook(store.database, added, secret, store.key, nonce)

    complete(work())
    if as_json:
        put_json({**_webhook_json(added), "secretToken": secret.reveal()})
    else:
        say(f"Added webhook {added.id}. Its secret, with which the receiver verifies, is shown only now:")
        say(secret.reveal())


@webhook.command("list")
def webhook_list(account_id: AccountArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the webhooks of an account."""
    settings = settings_of(config)

    async def work() -> list[webhooks.StoredWebhook]:
        async with open_store(settings) as store:
            return await webhooks.list_webhooks(store.database, account_id)

    found = complete(work())
    if as_json:
        put_json({"webhooks": [{**_state_json(stored), "createdAt": stored.created_at} for stored in found]})
        return
    rows = [
        (
            stored.webhook.id,
            stored.webhook.url,
            "all" if stored.webhook.event_types is None else ", ".join(stored.webhook.event_types),
            "all" if stored.webhook.vault_ids is None else ", ".join(stored.webhook.vault_ids),
            _state(stored),
        )
        for stored in found
    ]
    put_table(("id", "url", "event types", "vaults", "state"), rows, "no webhooks yet: 'vaultevents webhook add'")


@webhook.command("remove")
def webhook_remove(
    account_id: AccountArgument,
    webhook_id: WebhookArgument,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a webhook.

    Its secret is erased, and what was still to be delivered to it is cancelled.
    """
    settings = settings_of(config)

    async def work() -> None:
        async with open_store(settings) as store:
            await webhooks.delete_webhook(store.database, account_id, webhook_id)

    complete(work())
    if as_json:
        put_json({"id": webhook_id, "removed": True})
    else:
        say(f"Removed webhook {webhook_id}.")


@webhook.command("rotate-secret")
def webhook_rotate_secret(
    account_id: AccountArgument,
    webhook_id: WebhookArgument,
    overlap: Annotated[
        str,
        typer.Option(
            help="How long the former secret stays valid, too, such as 30m or 24h, 7d at most; 0 after a disclosure.",
            metavar="TIME",
        ),
    ] = "24h",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a webhook another signing secret and show it, once.

    Until the overlap ends each delivery has a signature by either, so the receiver can change over at any time.
    """
    settings = settings_of(config)
    overlap_s = overlap_of(overlap, most_days=7)
    secret = Secret(new_secret(secrets.token_bytes(SECRET_BYTES)))

    async def work() -> datetime:
        async with open_store(settings) as store:
            nonce = secrets.token_bytes(NONCE_BYTES)
            return await webhooks.rotate_secret(
                store.database, account_id, webhook_id, secret, store.key, nonce, overlap_s
            )

    until = complete(work())
    if as_json:
        put_json({"id": webhook_id, "secretToken": secret.reveal(), "previousValidUntil": until})
    else:
        former = f"valid until {until.isoformat(timespec='seconds')}" if overlap_s else "not valid any longer"
        say(f"Webhook {webhook_id} has a new secret; the former one is {former}. The new one is shown only now:")
        say(secret.reveal())


@webhook.command("enable")
def webhook_enable(webhook_id: WebhookArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Switch a webhook on, also one that was switched off after failures, or end its pause.

    Its failures are forgotten, and what was kept for it is sent by the running service. Events that fired while it was
    off are sent only by the API's 'recover'.
    """
    settings = settings_of(config)

    async def work() -> webhooks.StoredWebhook:
        async with open_store(settings) as store:
            return await webhooks.switch_on(store.database, webhook_id)

    _say_state(complete(work()), as_json=as_json)


@webhook.command("pause")
def webhook_pause(
    webhook_id: WebhookArgument,
    lasting: Annotated[
        str | None,
        typer.Option(
            "--for", help="How long, such as 30m or 2h, 30d at most (default: until 'enable').", metavar="TIME"
        ),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send nothing to a webhook for a time, or until 'enable'.

    Events are kept for it, and sent afterwards. Its owner can end the pause, too (PATCH {"active": true}).
    """
    settings = settings_of(config)
    pause_s = None if lasting is None else duration_of(lasting, "--for", most_days=30)

    async def work() -> webhooks.StoredWebhook:
        async with open_store(settings) as store:
            return await webhooks.pause(store.database, webhook_id, pause_s)

    _say_state(complete(work()), as_json=as_json)


def _say_state(stored: webhooks.StoredWebhook, *, as_json: bool) -> None:
    """Say whether a webhook is on, off or paused."""
    shown = stored.webhook
    if as_json:
        put_json(_state_json(stored))
    else:
        say(f"Webhook {shown.id} of account {shown.account_id} is {_state(stored)}.")


def _state_json(stored: webhooks.StoredWebhook) -> dict[str, object]:
    reason, until = stored.disabled_reason, stored.parked_until
    return {**_webhook_json(stored.webhook), "disabledReason": reason, "pausedUntil": until}


def _state(stored: webhooks.StoredWebhook) -> str:
    if not stored.webhook.active:
        return f"off ({stored.disabled_reason or 'switched off'})"
    if stored.parked_until is None or stored.parked_until < datetime.now(UTC):
        return "on"
    if stored.parked_until == webhooks.UNTIL_ENABLED:
        return "paused until 'enable'"
    return f"paused until {stored.parked_until.isoformat(timespec='seconds')}"


@webhook.command("test")
def webhook_test(
    webhook_id: WebhookArgument,
    wait_s: Annotated[
        float, typer.Option("--wait", help="Seconds to wait for the answer.", min=0, max=300, metavar="SECONDS")
    ] = 20.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send something that is no event to a webhook, and show what its receiver answers.

    The running service sends it, once, also to a webhook that is off. Exit code 1 when it was not accepted.
    """
    settings = settings_of(config)

    async def work() -> tuple[str, resends.TestResult | None]:
        async with open_store(settings) as store:
            now_ms = int((await store.database.now()).timestamp() * 1000)
            async with store.database.transaction() as connection:
                account_id = await webhooks.account_of(connection, webhook_id)
                found = await webhooks.find_webhook(connection, account_id, webhook_id)
                test_id = await resends.request_new_test(connection, found.webhook, secrets.token_hex(8), now_ms)
            return test_id, await _answer(store, webhook_id, test_id, wait_s)

    test_id, result = complete(work())
    accepted = result is not None and result.accepted
    if as_json:
        answer = None if result is None else asdict(result)
        put_json({"id": test_id, "webhookId": webhook_id, "accepted": accepted, "answer": answer})
    elif result is None:
        say(
            f"Asked for {test_id}, and it was not sent within {wait_s:g} s: see that 'vaultevents run' runs with the "
            f"role dispatch and that the webhook is not paused. Its receiver will see this id."
        )
    else:
        said = f": {result.excerpt}" if result.excerpt else ""
        outcome = f"status {result.status}{said}" if result.error is None else f"error {result.error}"
        say(f"Sent {test_id} in {result.duration_ms} ms: {'accepted' if accepted else 'not accepted'}, {outcome}")
    if not accepted:
        raise typer.Exit(1)


async def _answer(store: Store, webhook_id: str, test_id: str, wait_s: float) -> resends.TestResult | None:
    """Wait for what comes of a test; None when nothing has in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while True:
                async with store.database.statement() as connection:
                    if (result := await resends.test_result(connection, webhook_id, test_id)) is not None:
                        return result
                await asyncio.sleep(ASK_EVERY_S)
    return None


def _webhook_json(shown: Webhook) -> dict[str, object]:
    return {
        "id": shown.id,
        "url": shown.url,
        "eventTypes": shown.event_types,
        "stakingVaultIds": shown.vault_ids,
        "active": shown.active,
    }
