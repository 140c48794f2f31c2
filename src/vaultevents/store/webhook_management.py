"""Webhooks as their account manages them, in the transaction of a change or of a read (rules A2 to A5, A16 and D9).

Every statement names the account, and runs besides in a role that sees only that account's rows.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from vaultevents.core.errors import VaulteventsError
from vaultevents.core.sealing import MasterKey, Secret, open_sealed, seal
from vaultevents.core.webhooks import Webhook
from vaultevents.store.authorized_transaction import AuthorizedTransaction
from vaultevents.store.pool import Connection
from vaultevents.store.rotation import answer_aad
from vaultevents.store.webhooks import (
    OVERLAP_S,
    StoredWebhook,
    amend_webhook,
    erase_webhook,
    find_webhook,
    insert_webhook,
    replace_secret,
    require_vaults,
    stored_webhook,
)


class TooManyWebhooks(VaulteventsError):
    """The account has as many webhooks as it may (rule A17)."""


class IdempotencyConflict(VaulteventsError):
    """The Idempotency-Key stands for another request, or for a webhook that is gone (rule A16)."""


@dataclass(frozen=True, slots=True)
class Idempotency:
    """The client's key for one create, and the digest of what it asks for."""

    key: str
    fingerprint: bytes


async def find(connection: Connection, account_id: str, webhook_id: str) -> StoredWebhook:
    """Return a webhook of the account. Raises `WebhookUnknown`."""
    return await find_webhook(connection, account_id, webhook_id)


async def page(
    connection: Connection, account_id: str, limit: int, after: tuple[datetime, str] | None
) -> list[StoredWebhook]:
    """The webhooks of an account, newest first, those after the one created at a time with an id."""
    created_at, webhook_id = after or (None, None)
    rows = await connection.fetch(_PAGE, account_id, limit, created_at, webhook_id)
    return [stored_webhook(row) for row in rows]


_PAGE = """
select * from webhooks where account_id = $1 and deleted_at is null
    and ($3::timestamptz is null or (created_at, id) < ($3, $4))
order by created_at desc, id desc limit $2
"""


async def check_vaults(change: AuthorizedTransaction, vault_ids: Sequence[str] | None) -> None:
    """Raises `VaultsUnknown`."""
    if vault_ids is not None:
        await require_vaults(change.connection, change.account_id, vault_ids)


async def check_room(change: AuthorizedTransaction, limit: int) -> None:
    """Raises `TooManyWebhooks` where there is no room for one more."""
    count = await change.connection.fetchval(
        "select count(*) from webhooks where account_id = $1 and deleted_at is null", change.account_id
    )
    if count >= limit:
        raise TooManyWebhooks(f"the account has {count} webhooks, and {limit} is the limit: delete one first")


async def create(
    change: AuthorizedTransaction, webhook: Webhook, secret: Secret, key: MasterKey, nonce: bytes
) -> StoredWebhook:
    """Stores a checked webhook with its sealed secret."""
    return await insert_webhook(change.connection, webhook, secret, key, nonce)


async def repeated(change: AuthorizedTransaction, idempotency: Idempotency, key: MasterKey) -> Secret | None:
    """The answer that this Idempotency-Key was given before. Raises `IdempotencyConflict`."""
    row = await change.connection.fetchrow(
        "select fingerprint, webhook_id, sealed from idempotent_answers"
        " where account_id = $1 and key = $2 and created_at > db_now() - interval '24 h'",
        change.account_id,
        idempotency.key,
    )
    if row is None:
        return None
    if not hmac.compare_digest(row["fingerprint"], idempotency.fingerprint):
        raise IdempotencyConflict("this Idempotency-Key was used for another request: use a new one")
    if row["sealed"] is None:
        raise IdempotencyConflict("the webhook that this Idempotency-Key created is deleted: use a new one")
    return open_sealed(key, row["sealed"], answer_aad(row["webhook_id"]))


async def keep_answer(
    change: AuthorizedTransaction,
    idempotency: Idempotency,
    webhook_id: str,
    answer: Secret,
    key: MasterKey,
    nonce: bytes,
) -> None:
    """Keeps the answer to a create for a day, sealed, since it holds the secret."""
    await change.connection.execute(
        "insert into idempotent_answers (account_id, key, fingerprint, webhook_id, key_id, sealed)"
        " values ($1, $2, $3, $4, $5, $6) on conflict (account_id, key) do update set"
        " fingerprint = excluded.fingerprint, webhook_id = excluded.webhook_id, key_id = excluded.key_id,"
        " sealed = excluded.sealed, created_at = db_now()",  # one that is over a day old and was not removed yet
        change.account_id,
        idempotency.key,
        idempotency.fingerprint,
        webhook_id,
        key.id,
        seal(key, answer, answer_aad(webhook_id), nonce),
    )


async def amend(change: AuthorizedTransaction, webhook_id: str, fields: dict[str, Any]) -> StoredWebhook:
    """Change a webhook as `amend_webhook` does. Raises `WebhookUnknown`."""
    return await amend_webhook(change.connection, change.account_id, webhook_id, fields)


async def delete(change: AuthorizedTransaction, webhook_id: str) -> None:
    """Raises `WebhookUnknown`."""
    await erase_webhook(change.connection, change.account_id, webhook_id)


async def rotate_secret(
    change: AuthorizedTransaction,
    webhook_id: str,
    secret: Secret,
    key: MasterKey,
    nonce: bytes,
    overlap_s: float = OVERLAP_S,
) -> datetime:
    """Sign with `secret` at once; return until when the previous secret is valid. Raises as `replace_secret` does."""
    return await replace_secret(change.connection, webhook_id, secret, key, nonce, overlap_s)
