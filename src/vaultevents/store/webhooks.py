"""Webhooks and their secrets; queries are scoped by account, changes leave a revision (rules D2, D9 and D14)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from vaultevents.core.actor import acting
from vaultevents.core.errors import InputError, VaulteventsError
from vaultevents.core.sealing import MasterKey, Secret, seal
from vaultevents.core.webhooks import Webhook
from vaultevents.store import audit_log
from vaultevents.store.accounts import require_account
from vaultevents.store.flag_changes import record_flag_change
from vaultevents.store.notices import Notice, Reason, record
from vaultevents.store.pool import DELIVERIES_CHANNEL, Connection, Database, Record
from vaultevents.store.registry import lock_registry

OVERLAP_S: Final = 24 * 3600.0
MAX_OVERLAP_S: Final = 7 * 24 * 3600.0
"""How long a secret stays valid beside its successor, and how long it may (rule D2)."""


@dataclass(frozen=True, slots=True)
class StoredWebhook:
    """A webhook as its account sees it; never with its secret."""

    webhook: Webhook
    created_at: datetime
    disabled_reason: str | None
    parked_until: datetime | None


class WebhookUnknown(VaulteventsError):
    """The account has no webhook of this id: foreign, deleted and invented ids are answered alike."""


class VaultsUnknown(VaulteventsError):
    """A filter names vaults that the account has not registered now."""

    def __init__(self, vault_ids: Collection[str]) -> None:
        super().__init__(f"there is no vault {', '.join(map(repr, vault_ids))} that is registered now")
        self.vault_ids = frozenset(vault_ids)


async def active_webhooks(connection: Connection, account_ids: Iterable[str]) -> list[Webhook]:
    """The webhooks that may receive an event that commits in this transaction."""
    rows = await connection.fetch(
        "select id, account_id, url, event_types, vault_ids, active from webhooks"
        " where account_id = any($1) and active and deleted_at is null",
        sorted(account_ids),
    )
    return [_webhook(row) for row in rows]


async def create_webhook(database: Database, webhook: Webhook, secret: Secret, key: MasterKey, nonce: bytes) -> None:
    """Stores an operator's checked webhook with its sealed secret. Raises `InputError` (rule A3)."""
    async with database.transaction() as connection:
        await lock_registry(connection)
        await require_account(connection, webhook.account_id)
        try:
            await require_vaults(connection, webhook.account_id, webhook.vault_ids)
        except VaultsUnknown as unknown:
            named = ", ".join(map(repr, sorted(unknown.vault_ids)))
            raise InputError(f"account '{webhook.account_id}' has no vault {named} that is registered now") from None
        await insert_webhook(connection, webhook, secret, key, nonce)


async def insert_webhook(
    connection: Connection, webhook: Webhook, secret: Secret, key: MasterKey, nonce: bytes
) -> StoredWebhook:
    """Stores a webhook with its sealed secret. The registry must be locked."""
    row = await connection.fetchrow(
        "insert into webhooks (id, account_id, url, event_types, vault_ids, active)"
        " values ($1, $2, $3, $4, $5, $6) returning *",
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
    await record_revision(connection, webhook.id)
    await _record_act(connection, "create", webhook.id, None)
    return stored_webhook(row)


async def list_webhooks(database: Database, account_id: str) -> list[StoredWebhook]:
    """The webhooks of one account, newest first."""
    async with database.transaction() as connection:
        await require_account(connection, account_id)
        rows = await connection.fetch(
            "select * from webhooks where account_id = $1 and deleted_at is null order by created_at desc, id",
            account_id,
        )
    return [stored_webhook(row) for row in rows]


async def delete_webhook(database: Database, account_id: str, webhook_id: str) -> None:
    """An operator's delete. Raises `InputError` for a webhook that is not there."""
    async with database.transaction() as connection:
        await lock_registry(connection)
        try:
            await erase_webhook(connection, account_id, webhook_id)
        except WebhookUnknown:
            raise InputError(f"account '{account_id}' has no webhook '{webhook_id}'") from None


async def account_of(connection: Connection, webhook_id: str) -> str:
    """Return the account of a webhook that an operator names by its id alone. Raises `InputError`."""
    account_id: str | None = await connection.fetchval(
        "select account_id from webhooks where id = $1 and deleted_at is null", webhook_id
    )
    if account_id is None:
        raise InputError(f"there is no webhook '{webhook_id}': 'vaultevents webhook list ACCOUNT' shows them")
    return account_id


async def switch_on(database: Database, webhook_id: str) -> StoredWebhook:
    """Switch a webhook on for an operator, as its owner can (`amend_webhook`). Raises `InputError`."""
    async with database.transaction() as connection:
        await lock_registry(connection)
        account_id = await account_of(connection, webhook_id)
        return await amend_webhook(connection, account_id, webhook_id, {"active": True})


async def pause(database: Database, webhook_id: str, pause_s: float | None) -> StoredWebhook:
    """Pause a webhook for an operator (`pause_webhook`). Raises `InputError`, also for one that is off."""
    async with database.transaction() as connection:
        account_id = await account_of(connection, webhook_id)
        if await pause_webhook(connection, webhook_id, pause_s) is None:
            raise InputError(
                f"the webhook '{webhook_id}' is off, so that nothing is sent: "
                f"'vaultevents webhook enable {webhook_id}' switches it on"
            )
        return await find_webhook(connection, account_id, webhook_id)


async def erase_webhook(connection: Connection, account_id: str, webhook_id: str) -> None:
    """Delete a webhook at once and erase its secret (rule D14). The registry must be locked.

    What is pending is no longer claimed; it is cancelled in batches (`flag_changes`).
    """
    before = await _state(connection, webhook_id)
    done = await connection.execute(
        "update webhooks set deleted_at = db_now(), active = false"
        " where account_id = $1 and id = $2 and deleted_at is null",
        account_id,
        webhook_id,
    )
    if done == "UPDATE 0":
        raise WebhookUnknown
    await connection.execute("delete from webhook_secrets where webhook_id = $1", webhook_id)
    await connection.execute(
        "update idempotent_answers set sealed = null where account_id = $1 and webhook_id = $2", account_id, webhook_id
    )
    await record_flag_change(connection, webhook_id)
    await record_revision(connection, webhook_id)
    await _record_act(connection, "delete", webhook_id, before)


async def rotate_secret(
    database: Database,
    account_id: str,
    webhook_id: str,
    secret: Secret,
    key: MasterKey,
    nonce: bytes,
    overlap_s: float = OVERLAP_S,
) -> datetime:
    """An operator's `replace_secret`. Raises `InputError` also for a webhook that is not there."""
    async with database.of_account(account_id) as connection:
        await lock_registry(connection)
        try:
            return await replace_secret(connection, webhook_id, secret, key, nonce, overlap_s)
        except WebhookUnknown:
            raise InputError(f"account '{account_id}' has no webhook '{webhook_id}'") from None


async def replace_secret(
    connection: Connection, webhook_id: str, secret: Secret, key: MasterKey, nonce: bytes, overlap_s: float
) -> datetime:
    """Signs with `secret` from now on, and with the one before it, too, until the time that is returned (rule D2).

    Never are more than two valid: what an earlier rotation left is erased, and without an overlap everything is. The
    connection is one of the account, the registry locked. Raises `WebhookUnknown`, and `InputError` for an overlap of
    more than a week.
    """
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        raise InputError("a secret stays valid beside its successor for 0 s to 7 days: choose an overlap in between")
    sealed = seal(key, secret, webhook_id, nonce)
    before = await _state(connection, webhook_id)
    until: datetime | None = await connection.fetchval(
        "select replace_secret($1, $2, $3, $4)", webhook_id, key.id, sealed, overlap_s
    )
    if until is None:
        raise WebhookUnknown
    await _record_act(connection, "rotate_secret", webhook_id, before)
    return until


async def disable_webhook(connection: Connection, webhook_id: str, why: Reason) -> None:
    """Switch a webhook off (rules D3 and D7). The registry must be locked.

    Nothing more is claimed for it, and nothing is dropped: what is pending is parked in batches (`flag_changes`).
    """
    before = await _state(connection, webhook_id)
    done = await connection.execute(
        "update webhooks set active = false, disabled_reason = $2 where id = $1 and active", webhook_id, why
    )
    if done == "UPDATE 0":
        return
    await record_flag_change(connection, webhook_id)
    await record_revision(connection, webhook_id)
    await record(connection, [Notice("webhook_disabled", webhook_id, why)])
    await _record_act(connection, "disable", webhook_id, before)


async def pause_webhook(connection: Connection, webhook_id: str, pause_s: float | None) -> datetime | None:
    """Let deliveries and resends wait for so many seconds, or until the webhook is switched on; until when.

    Events go on to be stored for it. A longer pause that the receiver asked for (rule D6) is kept. None where
    the webhook is off or deleted, and nothing is done.
    """
    before = await _state(connection, webhook_id)
    until: datetime | None = await connection.fetchval(_PAUSE, webhook_id, pause_s, UNTIL_ENABLED)
    if until is not None:
        await _record_act(connection, "pause", webhook_id, before)
    return until


UNTIL_ENABLED: Final = datetime(9999, 1, 1, tzinfo=UTC)
"""The end of a pause that has none."""

_PAUSE = """
update webhooks set paused_until = case when $2::float8 is null then $3
    else greatest(paused_until, db_now() + make_interval(secs => $2)) end
where id = $1 and active and deleted_at is null returning paused_until
"""


async def amend_webhook(
    connection: Connection, account_id: str, webhook_id: str, fields: dict[str, Any]
) -> StoredWebhook:
    """Change `url`, `event_types`, `vault_ids` or `active`, those that `fields` names. The registry must be locked.

    A new `url` holds for pending deliveries, a narrowed filter recalls none. With `active: false` nothing more is
    claimed; with `true` what was parked becomes due, and what disabled or parked the webhook is forgiven, also one that
    is on (rules A5 and D9). Raises `WebhookUnknown`.
    """
    old = await find_webhook(connection, account_id, webhook_id)
    before = await _state(connection, webhook_id)
    new = {
        "url": old.webhook.url,
        "event_types": old.webhook.event_types,
        "vault_ids": old.webhook.vault_ids,
        "active": old.webhook.active,
        **fields,
    }
    if fields.get("active"):
        await _forgive(connection, webhook_id, was_off=not old.webhook.active)
    changed = {name for name, value in new.items() if getattr(old.webhook, name) != value}
    if changed:
        await _amend(connection, account_id, old.webhook, new)
    act = "update" if changed - {"active"} else "enable" if new["active"] else "disable"
    await _record_act(connection, act, webhook_id, before)
    return await find_webhook(connection, account_id, webhook_id)


async def _amend(connection: Connection, account_id: str, old: Webhook, new: dict[str, Any]) -> None:
    """Store the fields that changed, with what follows from switching a webhook on or off."""
    await connection.execute(
        "update webhooks set url = $3, event_types = $4, vault_ids = $5, active = $6,"
        " disabled_reason = case when $6 then null else disabled_reason end"
        " where account_id = $1 and id = $2 and deleted_at is null",
        account_id,
        old.id,
        new["url"],
        new["event_types"],
        new["vault_ids"],
        new["active"],
    )
    if old.active and not new["active"]:
        await record_flag_change(connection, old.id)
    if new["active"] and not old.active:
        await record(connection, [Notice("webhook_enabled", old.id)])
    await record_revision(connection, old.id)


async def find_webhook(connection: Connection, account_id: str, webhook_id: str) -> StoredWebhook:
    """Return a webhook of the account. Raises `WebhookUnknown`."""
    row = await connection.fetchrow(
        "select * from webhooks where account_id = $1 and id = $2 and deleted_at is null", account_id, webhook_id
    )
    if row is None:
        raise WebhookUnknown
    return stored_webhook(row)


async def _forgive(connection: Connection, webhook_id: str, *, was_off: bool) -> None:
    """Forget failures and pauses (rule A5), and let what was parked become due."""
    await connection.execute(
        "update webhooks set failures = 0, first_failure_at = null, last_failure_at = null, parks = 0,"
        " parked_until = null, paused_until = null, warned_at = null where id = $1",
        webhook_id,
    )
    await record_flag_change(connection, webhook_id, switched_on=was_off)
    await connection.execute("select pg_notify($1, '')", DELIVERIES_CHANNEL)


def stored_webhook(row: Record) -> StoredWebhook:
    return StoredWebhook(_webhook(row), row["created_at"], row["disabled_reason"], _parked_until(row))


def _parked_until(row: Record) -> datetime | None:
    """When deliveries go on: after what the receiver asked for and what its failures cost."""
    return max((end for end in (row["paused_until"], row["parked_until"]) if end is not None), default=None)


def _webhook(row: Record) -> Webhook:
    types, vaults = _tuple(row["event_types"]), _tuple(row["vault_ids"])
    return Webhook(row["id"], row["account_id"], row["url"], types, vaults, row["active"])


def _tuple(values: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


async def require_vaults(connection: Connection, account_id: str, vault_ids: Iterable[str] | None) -> None:
    """Raises `VaultsUnknown` unless each vault is one of the account and registered now."""
    rows = await connection.fetch(
        "select distinct vault_id from vault_spans where account_id = $1 and last_block is null", account_id
    )
    known = {row["vault_id"] for row in rows}
    if unknown := [vault_id for vault_id in vault_ids or () if vault_id not in known]:
        raise VaultsUnknown(unknown)


async def record_revision(connection: Connection, webhook_id: str) -> None:
    """Keeps the filter from now on as a revision, so that a later reader knows what an event was matched with."""
    await connection.execute("update registry set filter_revision = filter_revision + 1")
    await connection.execute(
        "insert into webhook_revisions (revision, webhook_id, account_id, event_types, vault_ids, active)"
        " select r.filter_revision, w.id, w.account_id, w.event_types, w.vault_ids, w.active"
        " from webhooks w, registry r where w.id = $1",
        webhook_id,
    )


async def _state(connection: Connection, webhook_id: str) -> dict[str, Any] | None:
    """Return the state of a webhook as the audit log digests it, with the times of its secrets; None once deleted."""
    row = await connection.fetchrow(_STATE, webhook_id)
    return None if row is None else dict(row)


_STATE = """
select id, account_id, url, event_types, vault_ids, active, disabled_reason, paused_until, failures, parked_until,
    array(select s.created_at from webhook_secrets s where s.webhook_id = w.id order by s.created_at) as secrets_since,
    array(select s.valid_until from webhook_secrets s where s.webhook_id = w.id order by s.created_at) as secrets_until
from webhooks w where id = $1 and deleted_at is null
"""


async def _record_act(connection: Connection, act: str, webhook_id: str, before: dict[str, Any] | None) -> None:
    """Record in the audit log what was done to a webhook that was in the state `before`."""
    after = await _state(connection, webhook_id)
    account_id = (before or after or {}).get("account_id")
    await audit_log.record(
        connection, acting(), f"webhook.{act}", webhook_id, account_id=account_id, before=before, after=after
    )
