"""Actions on webhooks: posted forms that run what the API or a command runs, which records it (rule T22)."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from vaultevents.console import fields
from vaultevents.console.access import form_of
from vaultevents.console.context import ConsoleContext
from vaultevents.console.links import event_url, webhook_url, with_query
from vaultevents.console.rendering import render
from vaultevents.core.errors import InputError
from vaultevents.core.sealing import NONCE_BYTES, Secret
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.store import resends, webhooks
from vaultevents.store.webhook_search import webhook as find_row

Act = Callable[[Request, str], Awaitable[Response]]
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def routes(context: ConsoleContext) -> list[Route]:
    """Return the routes of the actions on one webhook."""
    database = context.database

    async def enable(request: Request, webhook_id: str) -> Response:
        await webhooks.switch_on(database, webhook_id)
        return _back(webhook_id, done="enable")

    async def pause(request: Request, webhook_id: str) -> Response:
        lasting = fields.duration(form_of(request), "lasting")
        await webhooks.pause(database, webhook_id, None if lasting is None else lasting.total_seconds())
        return _back(webhook_id, done="pause")

    async def test(request: Request, webhook_id: str) -> Response:
        now_ms = int((await database.now()).timestamp() * 1000)
        async with database.transaction() as connection:
            account_id = await webhooks.account_of(connection, webhook_id)
            found = await webhooks.find_webhook(connection, account_id, webhook_id)
            test_id = await resends.request_new_test(connection, found.webhook, secrets.token_hex(8), now_ms)
        return _back(webhook_id, test=test_id)

    async def resend(request: Request, webhook_id: str) -> Response:
        form = form_of(request)
        event_id = fields.text(form, "event") or ""
        async with database.transaction() as connection:
            account_id = await webhooks.account_of(connection, webhook_id)
            asked_at = await resends.request_resend(connection, account_id, webhook_id, event_id)
        if asked_at is None:
            raise InputError("there is no delivery of this event to this webhook: recover it instead")
        if isinstance(asked_at, resends.Orphaned):
            raise InputError("the block of this event is no longer on the chain, so it is not sent")
        if form.get("back") == "event":
            return RedirectResponse(with_query(event_url(account_id, event_id), {"done": "resend"}), 303)
        return _back(webhook_id, done="resend")

    async def recover(request: Request, webhook_id: str) -> Response:
        since = fields.moment(form_of(request), "since")
        if since is None:
            raise InputError("'since' is missing: write a time such as 2026-01-31T12:00")
        since_ms = (since - EPOCH) // timedelta(milliseconds=1)
        async with database.transaction() as connection:
            account_id = await webhooks.account_of(connection, webhook_id)
            asked = await resends.request_recovery(connection, account_id, webhook_id, since_ms, None)
        rest = None
        if asked.next_since_ms is not None:
            rest = fields.moment_field(EPOCH + timedelta(milliseconds=asked.next_since_ms))
        return _back(webhook_id, done="recover", count=asked.count, rest=rest)

    async def rotate_secret(request: Request, webhook_id: str) -> Response:
        overlap = fields.duration(form_of(request), "overlap")
        async with database.transaction() as connection:
            account_id = await webhooks.account_of(connection, webhook_id)
        secret = Secret(new_secret(secrets.token_bytes(SECRET_BYTES)))
        until = await webhooks.rotate_secret(
            database,
            account_id,
            webhook_id,
            secret,
            context.key,
            secrets.token_bytes(NONCE_BYTES),
            0.0 if overlap is None else overlap.total_seconds(),
        )
        return render(
            request, "secret.html", webhook_id=webhook_id, secret=secret.reveal(), until=until, overlap=overlap
        )

    acts: dict[str, Act] = {
        "enable": enable,
        "pause": pause,
        "test": test,
        "resend": resend,
        "recover": recover,
        "rotate-secret": rotate_secret,
    }
    return [
        Route(f"/webhooks/{{webhook_id}}/{name}", _on_webhook(context, act), methods=["POST"])
        for name, act in acts.items()
    ]


def _on_webhook(context: ConsoleContext, act: Act) -> Callable[[Request], Awaitable[Response]]:
    """Run an action on a webhook that is there."""

    async def run(request: Request) -> Response:
        webhook_id = fields.path_text(request, "webhook_id")
        async with context.database.transaction() as connection:
            row = await find_row(connection, webhook_id)
        if row is None or row.deleted_at is not None:
            raise HTTPException(404)
        return await act(request, webhook_id)

    return run


def _back(webhook_id: str, **query: object) -> Response:
    return RedirectResponse(with_query(webhook_url(webhook_id), query), 303)
