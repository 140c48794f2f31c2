"""What an account asks a webhook to do: resend, recover, test, and sign with another secret (rules A19 and D11)."""

from __future__ import annotations

import secrets

from fastapi import FastAPI, Request
from starlette.responses import Response

from vaultevents.api import models
from vaultevents.api.handlers import JSON, STEP_UP, ApiContext, caller_of
from vaultevents.api.problems import Invalid, Problem, validation_failed
from vaultevents.core.events import TEST_TYPE
from vaultevents.core.sealing import NONCE_BYTES, Secret
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.store import resends, webhook_management


def add_actions(app: FastAPI, desk: ApiContext) -> None:
    """The POSTs below a webhook; only the one that shows a secret needs a step-up code (rule A15)."""
    _add_resends(app, desk)
    _add_test(app, desk)
    _add_rotation(app, desk)


def _add_resends(app: FastAPI, desk: ApiContext) -> None:

    @app.post(
        "/v1/account/webhooks/{webhook_id}/deliveries/{event_id}/resend",
        response_model=models.ResendAsked,
        status_code=202,
        summary="Send one event once more",
    )
    async def resend(request: Request, webhook_id: str, event_id: str, body: models.NoFields | None = None) -> Response:
        caller = caller_of(request)
        async with desk.acting(caller) as connection:
            asked_at = await resends.request_resend(connection, caller.key.account_id, webhook_id, event_id)
            if asked_at is None:
                raise Problem("not_found", "there is no delivery of this event to this webhook")
            if isinstance(asked_at, resends.Orphaned):
                raise Problem(
                    "event_orphaned",
                    "the block of this event is no longer on the chain, so it is not sent: ask again when it is back",
                )
        return _accepted(models.ResendAsked(event_id=event_id, requested_at=asked_at))

    @app.post(
        "/v1/account/webhooks/{webhook_id}/recover",
        response_model=models.RecoveryAsked,
        status_code=202,
        summary="Send every event of a range of time that is neither delivered nor pending",
    )
    async def recover(request: Request, webhook_id: str, body: models.Range) -> Response:
        """The webhook's present filter decides, also about events that did not match when they fired."""
        if body.until is not None and body.until <= body.since:
            raise validation_failed([Invalid("/until", "invalid", "until has to be greater than since")])
        caller = caller_of(request)
        account_id = caller.key.account_id
        async with desk.acting(caller) as connection:
            await webhook_management.find(connection, account_id, webhook_id)
            asked = await resends.request_recovery(connection, account_id, webhook_id, body.since, body.until)
        return _accepted(models.RecoveryAsked(count=asked.count, next_since=asked.next_since_ms))


def _add_test(app: FastAPI, desk: ApiContext) -> None:

    @app.post(
        "/v1/account/webhooks/{webhook_id}/test",
        response_model=models.TestAsked,
        status_code=202,
        summary="Send something that is no event, to try the receiver",
    )
    async def test(request: Request, webhook_id: str, body: models.NoFields | None = None) -> Response:
        caller = caller_of(request)
        account_id = caller.key.account_id
        async with desk.acting(caller) as connection:
            webhook = (await webhook_management.find(connection, account_id, webhook_id)).webhook
            now_ms = int(desk.now_s() * 1000)
            test_id = await resends.request_new_test(connection, webhook, secrets.token_hex(8), now_ms)
        return _accepted(models.TestAsked(id=test_id, event_type=TEST_TYPE))


def _add_rotation(app: FastAPI, desk: ApiContext) -> None:

    @app.post(
        "/v1/account/webhooks/{webhook_id}/rotate-secret",
        response_model=models.NewSecret,
        summary="Sign with another secret from now on, and with the present one, too, for a day",
        openapi_extra=STEP_UP,
    )
    async def rotate_secret(request: Request, webhook_id: str, body: models.NoFields | None = None) -> Response:
        secret = Secret(new_secret(secrets.token_bytes(SECRET_BYTES)))
        async with desk.changing(caller_of(request)) as change:
            await webhook_management.find(change.connection, change.account_id, webhook_id)
            await change.step_up()
            until = await webhook_management.rotate_secret(
                change, webhook_id, secret, desk.key, secrets.token_bytes(NONCE_BYTES)
            )
        answer = models.NewSecret(secret_token=secret.reveal(), previous_valid_until=until)
        return Response(answer.model_dump_json(by_alias=True), media_type=JSON)


def _accepted(answer: models.ResponseBody) -> Response:
    return Response(answer.model_dump_json(by_alias=True), 202, media_type=JSON)
