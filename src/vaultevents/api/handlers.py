"""The routes of customers: thin, from a verified request to the store and back (rules A1 to A8, A16 and A19)."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import msgspec
from fastapi import FastAPI, Header, Query, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from vaultevents.api import models
from vaultevents.api.auth import Caller
from vaultevents.api.limits import AccountShares, Rate, Shares
from vaultevents.api.problems import Invalid, Problem, validation_failed
from vaultevents.core.actor import acting_as
from vaultevents.core.errors import InputError
from vaultevents.core.jsonbody import MAX_BODY_BYTES
from vaultevents.core.pagination import decode_cursor, encode_cursor
from vaultevents.core.registry import Vault
from vaultevents.core.sealing import NONCE_BYTES, HashKey, MasterKey, Secret
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.core.tokens import MAX_AGE_S, TokenRules
from vaultevents.core.units import checksum
from vaultevents.core.webhooks import UrlRules, Webhook, check_event_types, check_url
from vaultevents.store import accounts, feed, history, webhook_management
from vaultevents.store.authorized_transaction import Authorization, AuthorizedTransaction, action, mutation
from vaultevents.store.feed import FeedPosition
from vaultevents.store.history import DeliveryState
from vaultevents.store.pool import Connection, Database
from vaultevents.store.webhooks import StoredWebhook, VaultsUnknown

MAX_PAGE: Final = 250
JSON: Final = "application/json"

PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE, description="how many at most")]
PageCursor = Annotated[str | None, Query(max_length=512, description="from the Link header of the page before")]
TimeMs = Annotated[int | None, Query(ge=0, lt=2**53, description="created_at, Unix epoch in milliseconds")]

STEP_UP: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": "X-MFA-Code",
            "in": "header",
            "required": True,
            "schema": {"type": "string", "pattern": "^[0-9]{6}$"},
            "description": "the account's present TOTP code (RFC 6238)",
        }
    ]
}


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What the routes work with."""

    database: Database
    key: MasterKey
    hash_key: HashKey
    url_rules: UrlRules
    token_rules: TokenRules
    rate: Rate
    max_webhooks: int
    now_s: Callable[[], float]
    shares: AccountShares = field(default_factory=lambda: AccountShares(Shares()))

    @asynccontextmanager
    async def reading(self, caller: Caller) -> AsyncIterator[Connection]:
        """A transaction that sees the caller's account."""
        account_id = caller.key.account_id
        async with self.shares.share(account_id), self.database.reading(account_id) as connection:
            yield connection

    @asynccontextmanager
    async def changing(self, caller: Caller) -> AsyncIterator[AuthorizedTransaction]:
        """The transaction of a change: token, step-up code and change commit or fail together (rules A13 and A15)."""
        account_id = caller.key.account_id
        async with self.shares.share(account_id), mutation(self.database, self._grant(caller), self.key) as change:
            with acting_as(f"api:{caller.key.id}"):
                yield change

    @asynccontextmanager
    async def acting(self, caller: Caller) -> AsyncIterator[Connection]:
        """The transaction of a request that needs no step-up code: it spends its token (rule A13)."""
        account_id = caller.key.account_id
        async with self.shares.share(account_id), action(self.database, self._grant(caller)) as connection:
            with acting_as(f"api:{caller.key.id}"):
                yield connection

    def _grant(self, caller: Caller) -> Authorization:
        return Authorization(caller.key.account_id, caller.token_digest, caller.code, self.now_s())

    def position(self, caller: Caller, kind: str, cursor: str | None) -> str | None:
        """Where a page begins; a cursor that is altered, foreign or of another list is not valid (rule A6)."""
        if cursor is None:
            return None
        return decode_cursor(self.hash_key, caller.key.account_id, kind, cursor)

    def next_page(self, request: Request, kind: str, position: str) -> dict[str, str]:
        """The header that leads to the page after `position` (RFC 8288), with the same parameters."""
        cursor = encode_cursor(self.hash_key, caller_of(request).key.account_id, kind, position)
        parameters = {**request.query_params, "cursor": cursor}
        return {"link": f'<{request.scope["path"]}?{urlencode(parameters)}>; rel="next"'}


def caller_of(request: Request) -> Caller:
    """Whom the gate let through."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def add_routes(app: FastAPI, desk: ApiContext) -> None:
    """All routes of an account, on the application itself: routers within routers are matched one by one."""
    _add_account(app, desk)
    _add_webhooks(app, desk)
    _add_deliveries(app, desk)
    _add_events(app, desk)


def _add_account(app: FastAPI, desk: ApiContext) -> None:

    @app.get("/v1/account", response_model=models.AccountFacts, summary="Who am I, and what time is it there?")
    async def account(request: Request) -> Response:
        key = caller_of(request).key
        async with desk.reading(caller_of(request)) as connection:
            facts, enrolled = await accounts.account_facts(connection, key.account_id)
            vaults = await accounts.vaults_of(connection, key.account_id)
        return _json(
            models.AccountFacts(
                id=key.account_id,
                name=facts.name,
                created_at=facts.created_at,
                api_key=models.KeyFacts(id=key.id, name=key.name, role=key.role),
                mfa=models.MfaFacts(enrolled=enrolled),
                staking_vaults=[_vault(vault) for vault in vaults],
                limits=models.Limits(
                    requests_per_minute=desk.rate.per_minute,
                    burst=desk.rate.burst,
                    webhooks=desk.max_webhooks,
                    body_bytes=MAX_BODY_BYTES,
                    token_age_seconds=MAX_AGE_S,
                    nonce_max=desk.token_rules.nonce_max,
                ),
                server_time=datetime.fromtimestamp(desk.now_s(), UTC),
            )
        )

    @app.get("/v1/account/vaults", response_model=list[models.StakingVault], summary="The vaults of the account")
    async def vaults(request: Request, limit: PageSize = 50, cursor: PageCursor = None) -> Response:
        caller = caller_of(request)
        after = desk.position(caller, "vaults", cursor) or ""
        async with desk.reading(caller) as connection:
            found = [vault for vault in await accounts.vaults_of(connection, caller.key.account_id) if vault.id > after]
        more = desk.next_page(request, "vaults", found[limit - 1].id) if len(found) > limit else {}
        return Response(_VAULTS.dump_json([_vault(vault) for vault in found[:limit]], by_alias=True), 200, more, JSON)


def _add_webhooks(app: FastAPI, desk: ApiContext) -> None:

    @app.get("/v1/account/webhooks", response_model=list[models.WebhookEntry], summary="List webhooks, newest first")
    async def list_webhooks(request: Request, limit: PageSize = 50, cursor: PageCursor = None) -> Response:
        caller = caller_of(request)
        position = desk.position(caller, "webhooks", cursor)
        after = None if position is None else _created(position)
        async with desk.reading(caller) as connection:
            found = await webhook_management.page(connection, caller.key.account_id, limit + 1, after)
        more = desk.next_page(request, "webhooks", _place(found[limit - 1])) if len(found) > limit else {}
        return Response(
            _ENTRIES.dump_json([_entry(webhook) for webhook in found[:limit]], by_alias=True), 200, more, JSON
        )

    @app.post(
        "/v1/account/webhooks",
        response_model=models.CreatedWebhook,
        status_code=201,
        summary="Create a webhook; the only answer that shows its secretToken",
        openapi_extra=STEP_UP,
    )
    async def create_webhook(
        request: Request,
        body: models.NewWebhook,
        idempotency_key: Annotated[
            str | None, Header(pattern="^[!-~]{1,255}$", description="a repeat within 24 h gets the first answer")
        ] = None,
    ) -> Response:
        caller = caller_of(request)
        webhook = Webhook(
            id=f"wh-{secrets.token_hex(12)}",
            account_id=caller.key.account_id,
            active=body.active,
            **_checked(desk, body),
        )
        secret = Secret(new_secret(secrets.token_bytes(SECRET_BYTES)))
        idempotency = (
            None if idempotency_key is None else webhook_management.Idempotency(idempotency_key, _fingerprint(body))
        )
        async with desk.changing(caller) as change:
            answer = None if idempotency is None else await webhook_management.repeated(change, idempotency, desk.key)
            if answer is not None:
                await change.step_up()
            else:
                await _naming_vaults(body, webhook_management.check_vaults(change, webhook.vault_ids))
                await webhook_management.check_room(change, desk.max_webhooks)
                await change.step_up()
                stored = await webhook_management.create(change, webhook, secret, desk.key, _nonce())
                created = models.CreatedWebhook(**dict(_entry(stored)), secret_token=secret.reveal())
                answer = Secret(created.model_dump_json(by_alias=True))
                if idempotency is not None:
                    await webhook_management.keep_answer(change, idempotency, webhook.id, answer, desk.key, _nonce())
        location = f"/v1/account/webhooks/{json.loads(answer.reveal())['id']}"
        return Response(answer.reveal(), 201, {"location": location}, JSON)

    @app.get("/v1/account/webhooks/{webhook_id}", response_model=models.WebhookEntry, summary="One webhook")
    async def webhook(request: Request, webhook_id: str) -> Response:
        caller = caller_of(request)
        async with desk.reading(caller) as connection:
            return _json(_entry(await webhook_management.find(connection, caller.key.account_id, webhook_id)))

    @app.patch(
        "/v1/account/webhooks/{webhook_id}",
        response_model=models.WebhookEntry,
        summary="Change a webhook (JSON Merge Patch)",
        openapi_extra=STEP_UP,
    )
    async def amend_webhook(request: Request, webhook_id: str, body: models.WebhookPatch) -> Response:
        named = body.model_fields_set
        if not named:
            raise validation_failed([Invalid("", "empty", "name at least one field to change")])
        fields = _checked(desk, body)
        if "active" in named:
            fields["active"] = body.active
        async with desk.changing(caller_of(request)) as change:
            await webhook_management.find(change.connection, change.account_id, webhook_id)
            await _naming_vaults(body, webhook_management.check_vaults(change, fields.get("vault_ids")))
            await change.step_up()
            return _json(_entry(await webhook_management.amend(change, webhook_id, fields)))

    @app.delete(
        "/v1/account/webhooks/{webhook_id}",
        status_code=204,
        summary="Delete a webhook; its secret is erased, what is pending is cancelled",
        openapi_extra=STEP_UP,
    )
    async def delete_webhook(request: Request, webhook_id: str) -> Response:
        async with desk.changing(caller_of(request)) as change:
            await webhook_management.find(change.connection, change.account_id, webhook_id)
            await change.step_up()
            await webhook_management.delete(change, webhook_id)
        return Response(status_code=204)


def _add_deliveries(app: FastAPI, desk: ApiContext) -> None:

    @app.get("/v1/account/webhooks/{webhook_id}/health", response_model=models.Health, summary="How a webhook is doing")
    async def health(request: Request, webhook_id: str) -> Response:
        account_id = caller_of(request).key.account_id
        async with desk.reading(caller_of(request)) as connection:
            stored = await webhook_management.find(connection, account_id, webhook_id)
            found = await history.health(connection, account_id, webhook_id)
        return _json(_health(stored, found))

    @app.get(
        "/v1/account/webhooks/{webhook_id}/deliveries",
        response_model=list[models.Delivery],
        summary="Its deliveries, newest first",
    )
    async def deliveries(
        request: Request,
        webhook_id: str,
        state: DeliveryState | None = None,
        limit: PageSize = 50,
        cursor: PageCursor = None,
    ) -> Response:
        caller = caller_of(request)
        kind = f"deliveries of {webhook_id}"
        position = desk.position(caller, kind, cursor)
        async with desk.reading(caller) as connection:
            await webhook_management.find(connection, caller.key.account_id, webhook_id)
            found = await history.deliveries(
                connection, caller.key.account_id, webhook_id, state, limit + 1, int(position) if position else None
            )
        more = desk.next_page(request, kind, str(found[limit - 1].id)) if len(found) > limit else {}
        content = [_delivery(delivery) for delivery in found[:limit]]
        return Response(_DELIVERIES.dump_json(content, by_alias=True), 200, more, JSON)

    @app.get(
        "/v1/account/webhooks/{webhook_id}/deliveries/{event_id}",
        response_model=models.DeliveryWithAttempts,
        summary="One delivery, every attempt",
    )
    async def delivery(request: Request, webhook_id: str, event_id: str) -> Response:
        account_id = caller_of(request).key.account_id
        async with desk.reading(caller_of(request)) as connection:
            found = await history.delivery(connection, account_id, webhook_id, event_id)
        if found is None:
            raise Problem("not_found", "there is no delivery of this event to this webhook")
        facts, attempts = found
        return _json(
            models.DeliveryWithAttempts(
                **dict(_delivery(facts)), attempt_log=[_attempt(attempt) for attempt in attempts]
            )
        )


def _add_events(app: FastAPI, desk: ApiContext) -> None:

    @app.get("/v1/account/events", response_model=list[models.Event], summary="All events, in commit order")
    async def events(
        request: Request,
        since: TimeMs = None,
        until: TimeMs = None,
        limit: PageSize = 50,
        cursor: PageCursor = None,
    ) -> Response:
        """With this feed a receiver proves that it missed nothing.

        Each page that is not empty names the next one in its `Link` header; an empty one is the end for now: ask it
        again later. `since` (inclusive) and `until` (exclusive) choose by `created_at`.
        """
        caller = caller_of(request)
        position = desk.position(caller, "events", cursor)
        after = None if position is None else FeedPosition.parse(position)
        async with desk.reading(caller) as connection:
            found = await feed.page(connection, caller.key.account_id, limit, after, since, until)
        more = desk.next_page(request, "events", str(found[-1].position)) if found else {}
        return Response(b"[" + b",".join(event.body for event in found) + b"]", 200, more, JSON)

    @app.get("/v1/account/events/{event_id}", response_model=models.Event, summary="One event, as it was delivered")
    async def event(request: Request, event_id: str) -> Response:
        caller = caller_of(request)
        async with desk.reading(caller) as connection:
            body = await feed.find(connection, caller.key.account_id, event_id)
        if body is None:
            raise Problem("not_found", "there is no such event")
        return Response(body, media_type=JSON)


_ENTRIES = TypeAdapter(list[models.WebhookEntry])
_VAULTS = TypeAdapter(list[models.StakingVault])
_DELIVERIES = TypeAdapter(list[models.Delivery])


def _json(answer: models.ResponseBody) -> Response:
    return Response(answer.model_dump_json(by_alias=True), media_type=JSON)


def _nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def _fingerprint(body: models.NewWebhook) -> bytes:
    """Equal for equal requests, however their JSON is spaced or ordered (rule A16)."""
    value = body.model_dump(mode="json", exclude_unset=True)
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _checked(desk: ApiContext, body: models.NewWebhook | models.WebhookPatch) -> dict[str, Any]:
    """The fields of a webhook that the request names, by the rules of core; all that is wrong is reported at once."""
    wrong: list[Invalid] = []
    fields: dict[str, Any] = {}
    named = body.model_fields_set if isinstance(body, models.WebhookPatch) else type(body).model_fields
    if "url" in named:
        try:
            fields["url"] = check_url(body.url, desk.url_rules)
        except InputError as refused:
            wrong.append(Invalid("/url", "url_not_allowed", str(refused)))
    if "event_types" in named:
        for index, name in enumerate(body.event_types or ()):
            try:
                check_event_types([name])
            except InputError as refused:
                wrong.append(Invalid(f"/eventTypes/{index}", "event_type_unknown", str(refused)))
        fields["event_types"] = _once_each(body.event_types)
    if "staking_vault_ids" in named:
        fields["vault_ids"] = _once_each(body.staking_vault_ids)
    if wrong:
        raise validation_failed(wrong)
    return fields


def _once_each(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(dict.fromkeys(names))


async def _naming_vaults(body: models.NewWebhook | models.WebhookPatch, check: Awaitable[None]) -> None:
    """Report unknown, foreign and removed vaults alike, by their places in the body (rule A3)."""
    try:
        await check
    except VaultsUnknown as unknown:
        raise validation_failed(
            [
                Invalid(
                    f"/stakingVaultIds/{index}", "vault_unknown", f"{vault_id[:64]!r} is not a vault of this account"
                )
                for index, vault_id in enumerate(body.staking_vault_ids or ())
                if vault_id in unknown.vault_ids
            ]
        ) from None


def _entry(stored: StoredWebhook) -> models.WebhookEntry:
    webhook = stored.webhook
    return models.WebhookEntry(
        id=webhook.id,
        url=webhook.url,
        event_types=_listed(webhook.event_types),
        staking_vault_ids=_listed(webhook.vault_ids),
        active=webhook.active,
        created_at=stored.created_at,
    )


def _listed(names: tuple[str, ...] | None) -> list[str] | None:
    return None if names is None else list(names)


def _place(stored: StoredWebhook) -> str:
    return f"{stored.created_at.isoformat()} {stored.webhook.id}"


def _created(position: str) -> tuple[datetime, str]:
    time, _, webhook_id = position.partition(" ")
    return datetime.fromisoformat(time), webhook_id


def _vault(vault: Vault) -> models.StakingVault:
    return models.StakingVault(
        id=vault.id,
        address=checksum(vault.address),
        withdrawal_queue_address=None if vault.queue is None else checksum(vault.queue),
        start_block=vault.spans[-1].first,
    )


def _delivery(facts: history.DeliveryFacts) -> models.Delivery:
    return models.Delivery(
        event_id=facts.event_id,
        event_type=facts.event_type,
        state=facts.state,
        in_flight=facts.in_flight,
        attempts=facts.attempts,
        created_at=facts.created_at,
        next_attempt_at=facts.next_attempt_at,
        finished_at=facts.finished_at,
        recovered=facts.recovered,
    )


def _attempt(facts: history.AttemptFacts) -> models.Attempt:
    return models.Attempt(
        number=facts.number,
        resend=facts.resend,
        started_at=facts.started_at,
        duration_ms=facts.duration_ms,
        status=facts.status,
        error=facts.error,
        response_excerpt=facts.excerpt,
        address=facts.address,
        **msgspec.structs.asdict(facts.timing),
    )


def _health(stored: StoredWebhook, facts: history.Health) -> models.Health:
    failure = facts.last_failure
    return models.Health(
        active=stored.webhook.active,
        disabled_reason=stored.disabled_reason,
        parked_until=stored.parked_until,
        deliveries=facts.deliveries,
        oldest_pending_at=facts.oldest_pending_at,
        last_success_at=facts.last_success_at,
        last_failure=None if failure is None else models.FailureFacts(**asdict(failure)),
        failures_in_a_row=facts.failures_in_a_row,
    )
