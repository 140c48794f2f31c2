"""Webhooks and their secrets; every query is scoped by account, every change leaves a revision (D2, D9, D14)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from vaultevents.core.errors import InputError
from vaultevents.core.sealing import MasterKey, Secret, seal
from vaultevents.core.webhooks import Webhook
from vaultevents.store.accounts import require_account
from vaultevents.store.cursors import lock_registry
from vaultevents.store.pool import Connection, Database


@dataclass(frozen=True, slots=True)
class StoredWebhook:
    """A webhook as its account sees it; never with its secret."""

    webhook: Webhook
    created_at: datetime
    disabled_reason: str | None


async def active_webhooks(connection: Connection, account_ids: Iterable[str]) -> list[Webhook]:
    """The webhooks that may receive an event that commits in this transaction."""
    rows = await connection.fetch(
        "select id, account_id, url, event_types, vault_ids, active from webhooks"
        " where account_id = any($1) and active and deleted_at is null",
        sorted(account_ids),
    )
    return [_webhook(row) for row in rows]


async def create_webhook(database: Database, webhook: Webhook, secret: Secret, key: MasterKey, nonce: bytes) -> None:
    """Stores a checked webhook with its sealed secret. Raises `InputError` for an unknown account or vault (A3)."""
    async with database.transaction() as connection:
        await lock_registry(connection)
        await require_account(connection, webhook.account_id)
        await _require_vaults(connection, webhook)
        await connection.execute(
            "insert into webhooks (id, account_id, url, event_types, vault_ids, active)"
            " values ($1, $2, $3, $4, $5, $6)",
            webhook.id,
            webhook.account_id,
            webhook.url,
            webhook.event_types,
            webhook.vault_ids,
            webhook.active,
        )
        await connection.execute(
            "insert into webhook_secrets (webhook_id, key_id, sealed) values ($1, $2, $3)",
            webhook.id,
            key.id,
            seal(key, secret, webhook.id, nonce),
        )
        await _record_revision(connection, webhook.id)


async def list_webhooks(database: Database, account_id: str) -> list[StoredWebhook]:
    """The webhooks of one account, newest first."""
    async with database.transaction() as connection:
        await require_account(connection, account_id)
        rows = await connection.fetch(
            "select * from webhooks where account_id = $1 and deleted_at is null order by created_at desc, id",
            account_id,
        )
    return [StoredWebhook(_webhook(row), row["created_at"], row["disabled_reason"]) for row in rows]


async def delete_webhook(database: Database, account_id: str, webhook_id: str) -> None:
    """Gone at once: its secret is erased and what is pending is cancelled (D14)."""
    async with database.transaction() as connection:
        await lock_registry(connection)
        done = await connection.execute(
            "update webhooks set deleted_at = db_now(), active = false"
            " where account_id = $1 and id = $2 and deleted_at is null",
            account_id,
            webhook_id,
        )
        if done == "UPDATE 0":
            raise InputError(f"account '{account_id}' has no webhook '{webhook_id}'")
        await connection.execute("delete from webhook_secrets where webhook_id = $1", webhook_id)
        await connection.execute(
            "with pending as (select id from deliveries where webhook_id = $1 and state in ('scheduled', 'parked')"
            " order by id for update)"  # in the order of the ids, as every settle: so they never wait in a circle
            " update deliveries d set state = 'cancelled', next_attempt_at = null, finished_at = db_now()"
            " from pending where d.id = pending.id",
            webhook_id,
        )
        await _record_revision(connection, webhook_id)


async def disable_webhook(connection: Connection, webhook_id: str, why: str) -> None:
    """Switches a webhook off and parks what is pending for it (D3, D7). The registry must be locked."""
    done = await connection.execute(
        "update webhooks set active = false, disabled_reason = $2 where id = $1 and active", webhook_id, why
    )
    if done == "UPDATE 0":
        return
    await connection.execute(
        "with pending as (select id from deliveries where webhook_id = $1 and state = 'scheduled'"
        " order by id for update)"
        " update deliveries d set state = 'parked', next_attempt_at = null from pending where d.id = pending.id",
        webhook_id,
    )
    await _record_revision(connection, webhook_id)


async def sealed_key_ids(database: Database) -> set[str]:
    """The ids of the master keys that the stored secrets are sealed with (D2)."""
    async with database.transaction() as connection:
        return {row["key_id"] for row in await connection.fetch("select distinct key_id from webhook_secrets")}


def _webhook(row: object) -> Webhook:
    columns = dict(row)  # type: ignore[call-overload]
    return Webhook(
        columns["id"],
        columns["account_id"],
        columns["url"],
        _tuple(columns["event_types"]),
        _tuple(columns["vault_ids"]),
        columns["active"],
    )


def _tuple(values: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


async def _require_vaults(connection: Connection, webhook: Webhook) -> None:
    rows = await connection.fetch(
        "select distinct vault_id from vault_spans where account_id = $1 and last_block is null", webhook.account_id
    )
    known = {row["vault_id"] for row in rows}
    if unknown := [vault_id for vault_id in webhook.vault_ids or () if vault_id not in known]:
        raise InputError(
            f"account '{webhook.account_id}' has no vault {', '.join(map(repr, unknown))} that is registered now"
        )


async def _record_revision(connection: Connection, webhook_id: str) -> None:
    """Keeps the filter from now on as a revision, so that a later reader knows what an event was matched with."""
    await connection.execute("update registry set filter_revision = filter_revision + 1")
    await connection.execute(
        "insert into webhook_revisions (revision, webhook_id, account_id, event_types, vault_ids, active)"
        " select r.filter_revision, w.id, w.account_id, w.event_types, w.vault_ids, w.active"
        " from webhooks w, registry r where w.id = $1",
        webhook_id,
    )
