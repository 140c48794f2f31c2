"""account, vault and webhook: operator administration, through the code that the HTTP API uses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer

from vaultevents.chain.execution import HeadPolicy
from vaultevents.cli.console import (
    ConfigOption,
    JsonOption,
    complete,
    duration_of,
    overlap_of,
    put_json,
    put_table,
    say,
    settings_of,
)
from vaultevents.config import Settings
from vaultevents.core.errors import InputError
from vaultevents.core.registry import Vault, check_id
from vaultevents.core.sealing import NONCE_BYTES, Secret
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.core.units import Address, checksum, parse_address
from vaultevents.core.webhooks import Webhook, check_event_types, check_url
from vaultevents.opening.database import Store, open_store
from vaultevents.opening.delivery import url_rules
from vaultevents.opening.sources import open_chain
from vaultevents.store import accounts, resends, webhooks
from vaultevents.store.registry import current_registry

account = typer.Typer(help="Add and list accounts, which own vaults and webhooks.", no_args_is_help=True)
vault = typer.Typer(help="Add, list and remove the staking vaults that are watched.", no_args_is_help=True)
webhook = typer.Typer(
    help="Add, list, pause, enable, test and remove the URLs to which events are delivered.", no_args_is_help=True
)


def add_to(app: typer.Typer) -> None:
    app.add_typer(account, name="account")
    app.add_typer(vault, name="vault")
    app.add_typer(webhook, name="webhook")


AccountArgument = Annotated[str, typer.Argument(help="The account's id: letters, digits, hyphens.", metavar="ACCOUNT")]
VaultArgument = Annotated[str, typer.Argument(help="The vault's id: letters, digits, hyphens.", metavar="VAULT")]
WebhookArgument = Annotated[
    str, typer.Argument(help="The webhook's id, as 'webhook list' shows it.", metavar="WEBHOOK")
]
ASK_EVERY_S = 0.2
MAX_BLOCK = 2**63 - 1
"""What a database column holds."""


@account.command("add")
def account_add(
    account_id: AccountArgument,
    name: Annotated[str | None, typer.Option(help="A name for people (default: the id).")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add an account.

    Its id is part of the id of every event of it, and never changes.
    """
    settings = settings_of(config)
    check_id(account_id, "an account id")
    shown = name or account_id
    if not shown.isprintable():
        raise InputError("--name holds characters that cannot be printed: leave them out")

    async def work() -> accounts.Account:
        async with open_store(settings) as store:
            return await accounts.add_account(store.database, account_id, shown)

    added = complete(work())
    if as_json:
        put_json({"id": added.id, "name": added.name})
    else:
        say(f"Added account {added.id}.")


@account.command("list")
def account_list(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List all accounts."""
    settings = settings_of(config)

    async def work() -> list[accounts.Account]:
        async with open_store(settings) as store:
            return await accounts.accounts(store.database)

    found = complete(work())
    if as_json:
        put_json({"accounts": [{"id": one.id, "name": one.name, "createdAt": one.created_at} for one in found]})
    else:
        rows = [(one.id, one.name, one.created_at.isoformat(timespec="seconds")) for one in found]
        put_table(("id", "name", "created"), rows, "no accounts yet: 'vaultevents account add ACCOUNT'")


@vault.command("add")
def vault_add(
    account_id: AccountArgument,
    vault_id: VaultArgument,
    address: Annotated[str, typer.Argument(help="The staking vault contract.", metavar="ADDRESS")],
    queue: Annotated[
        str | None,
        typer.Option(help="Its pool's withdrawal queue contract; without it no claims are told.", metavar="ADDRESS"),
    ] = None,
    start_block: Annotated[
        str,
        typer.Option(
            help="First block whose events exist: a number, 'now' (after the finalized block) or 'creation' (of the "
            "vault, which an archive node can tell).",
            metavar="BLOCK",
        ),
    ] = "now",
    deliver: Annotated[
        bool, typer.Option("--deliver/--no-deliver", help="Deliver events of blocks that were read before.")
    ] = True,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a vault from a block on. Give the same again with an earlier start, or with a queue, to amend it.

    The id is part of every event of the vault and never changes.
    """
    settings = settings_of(config)
    check_id(account_id, "an account id")
    check_id(vault_id, "a vault id")
    contract = parse_address(address)
    queue_contract = None if queue is None else parse_address(queue)
    _refuse_core_queue(settings, queue_contract)
    start = _parse_start(start_block)

    async def work() -> accounts.Registered:
        async with open_store(settings) as store:
            first = start if isinstance(start, int) else await _start(settings, store, contract, start)
            return await accounts.add_vault(
                store.database, account_id, vault_id, contract, queue_contract, first, deliver=deliver
            )

    done = complete(work())
    backfills = [(span.first, span.last) for span in done.backfills]
    if as_json:
        put_json({**_vault_json(done.vault), "backfills": backfills})
        return
    open_span = done.vault.spans[-1]
    say(f"Watching vault {vault_id} ({checksum(contract)}) for account {account_id} from block {open_span.first} on.")
    for first, last in backfills:
        say(f"Blocks {first} to {last} will be read again for it; 'vaultevents status' shows how far that is.")


def _parse_start(text: str) -> int | Literal["now", "creation"]:
    if text == "now":
        return "now"
    if text == "creation":
        return "creation"
    if text.isascii() and text.isdigit() and (block := int(text[:20])) <= MAX_BLOCK:
        return block
    raise InputError(f"--start-block '{text}' is not a block: give a number, 'now' or 'creation'")


async def _start(settings: Settings, store: Store, contract: Address, start: Literal["now", "creation"]) -> int:
    """The block that a word stands for now (E12); always by the finalized head."""
    async with open_chain(settings, store.database, head=HeadPolicy()) as chain:
        return (await chain.head()).number + 1 if start == "now" else await chain.creation_block(contract)


def _refuse_core_queue(settings: Settings, queue: Address | None) -> None:
    if queue is not None and queue == settings.contracts.core_withdrawal_queue:
        raise InputError(
            f"{checksum(queue)} is the protocol's own withdrawal queue, which emits the claims of everybody: "
            "name the queue of the vault's pool"
        )


@vault.command("list")
def vault_list(
    account_id: Annotated[str | None, typer.Argument(help="Only those of this account.", metavar="[ACCOUNT]")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List vaults with the blocks for which they are registered."""
    settings = settings_of(config)

    async def work() -> Sequence[Vault]:
        async with open_store(settings) as store:
            return (await current_registry(store.database)).vaults

    found = [one for one in complete(work()) if account_id in (None, one.account_id)]
    if as_json:
        put_json({"vaults": [_vault_json(one) for one in found]})
        return
    rows = [
        (one.account_id, one.id, checksum(one.address), one.queue and checksum(one.queue), _spans_text(one))
        for one in found
    ]
    put_table(("account", "vault", "address", "queue", "blocks"), rows, "no vaults yet: 'vaultevents vault add'")


@vault.command("remove")
def vault_remove(
    account_id: AccountArgument, vault_id: VaultArgument, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Stop watching a vault; nothing that is stored is deleted.

    Events up to the finalized block of this moment still come.
    """
    settings = settings_of(config)

    async def work() -> Vault:
        async with open_store(settings) as store, open_chain(settings, store.database, head=HeadPolicy()) as chain:
            last = (await chain.head()).number
            return await accounts.remove_vault(store.database, account_id, vault_id, last)

    removed = complete(work())
    if as_json:
        put_json(_vault_json(removed))
    else:
        say(
            f"Vault {vault_id} of account {account_id} was watched for blocks {_spans_text(removed)}, and is no longer."
        )


def _spans_text(one: Vault) -> str:
    return ", ".join(f"{span.first}..{'' if span.last is None else span.last}" for span in one.spans)


def _vault_json(one: Vault) -> dict[str, object]:
    return {
        "accountId": one.account_id,
        "id": one.id,
        "address": checksum(one.address),
        "withdrawalQueueAddress": None if one.queue is None else checksum(one.queue),
        "spans": [{"firstBlock": span.first, "lastBlock": span.last} for span in one.spans],
    }


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
            one.webhook.id,
            one.webhook.url,
            "all" if one.webhook.event_types is None else ", ".join(one.webhook.event_types),
            "all" if one.webhook.vault_ids is None else ", ".join(one.webhook.vault_ids),
            _state(one),
        )
        for one in found
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


def _webhook_json(one: Webhook) -> dict[str, object]:
    return {
        "id": one.id,
        "url": one.url,
        "eventTypes": one.event_types,
        "stakingVaultIds": one.vault_ids,
        "active": one.active,
    }
