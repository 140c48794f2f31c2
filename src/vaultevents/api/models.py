"""What requests and answers hold, as pydantic models: they check the former, make the latter, and document both.

Fields and limits are those of `docs/api.md` and `docs/events.md`; in JSON names are written in camelCase.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from vaultevents.core.events import EVENT_TYPES
from vaultevents.store.history import DeliveryState

EventType = Annotated[str, Field(json_schema_extra={"enum": list(EVENT_TYPES)})]
"""Checked by core/webhooks.py, which knows the types; here it documents them."""

EVENT_TYPES_TEXT = "the event types that are delivered; null: all"
VAULTS_TEXT = "the vaults whose events are delivered; null: all vaults of the account, later ones included"


class Request(BaseModel):
    """A body: unknown fields and values of another type are refused."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", strict=True)


class NewWebhook(Request):
    """A webhook to be created; only `url` is required."""

    url: str = Field(description="https only", examples=["https://example.org/hook"])
    event_types: Annotated[list[EventType], Field(min_length=1)] | None = Field(None, description=EVENT_TYPES_TEXT)
    staking_vault_ids: Annotated[list[str], Field(min_length=1)] | None = Field(None, description=VAULTS_TEXT)
    active: bool = True


def _a_patch(schema: dict[str, Any]) -> None:
    """Name no defaults: a client made from them would send, and so change, what nobody named."""
    schema["minProperties"] = 1
    for field in schema["properties"].values():
        field.pop("default", None)


class WebhookPatch(Request):
    """A JSON Merge Patch (RFC 7396): an absent field stays as it is, `null` means all."""

    model_config = ConfigDict(json_schema_extra=_a_patch)

    url: str = Field("", description="https only")
    event_types: Annotated[list[EventType], Field(min_length=1)] | None = Field(None, description=EVENT_TYPES_TEXT)
    staking_vault_ids: Annotated[list[str], Field(min_length=1)] | None = Field(None, description=VAULTS_TEXT)
    active: bool = Field(True, description="true also resumes a webhook that was disabled or is parked")


class NoFields(Request):
    """Nothing: the body may as well be absent."""


class Range(Request):
    """Which events to recover, by their `created_at` in Unix milliseconds."""

    since: int = Field(ge=0, lt=2**53, description="inclusive, in Unix milliseconds")
    until: Annotated[int, Field(ge=0, lt=2**53)] | None = Field(None, description="exclusive; null: up to now")


class ResponseBody(BaseModel):
    """A body of ours."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


class WebhookEntry(ResponseBody):
    """A webhook."""

    id: str
    url: str
    event_types: list[EventType] | None
    staking_vault_ids: list[str] | None
    active: bool
    created_at: datetime


class CreatedWebhook(WebhookEntry):
    """The only answer that holds the secret with which deliveries are signed."""

    secret_token: str


class KeyFacts(ResponseBody):
    """The API key of the request."""

    id: str
    name: str
    role: Literal["read", "manage"]


class MfaFacts(ResponseBody):
    """Whether the account can step up."""

    enrolled: bool


class StakingVault(ResponseBody):
    """A vault that is registered now; events exist for it from `start_block` on."""

    id: str
    address: str
    withdrawal_queue_address: str | None
    start_block: int


class Limits(ResponseBody):
    """What this service lets an account do."""

    requests_per_minute: int
    burst: int
    webhooks: int
    body_bytes: int
    token_age_seconds: int
    nonce_max: int


class AccountFacts(ResponseBody):
    """Who is asking, and the service's time."""

    id: str
    name: str
    created_at: datetime
    api_key: KeyFacts
    mfa: MfaFacts
    staking_vaults: list[StakingVault]
    limits: Limits
    server_time: datetime


class FailureFacts(ResponseBody):
    """An attempt that failed: the receiver's status, or why there was none."""

    at: datetime
    status: int | None
    error: str | None


class Health(ResponseBody):
    """How a webhook is doing."""

    active: bool
    disabled_reason: str | None = Field(description="why it was switched off, when not by its account")
    parked_until: datetime | None = Field(description="when deliveries go on, where the receiver asked for a pause")
    deliveries: dict[DeliveryState, int] = Field(description="how many are in each state, a million at most")
    oldest_pending_at: datetime | None
    last_success_at: datetime | None
    last_failure: FailureFacts | None
    failures_in_a_row: int


class Delivery(ResponseBody):
    """One event on its way to one webhook."""

    event_id: str
    event_type: EventType
    state: DeliveryState
    in_flight: bool
    attempts: int
    created_at: datetime
    next_attempt_at: datetime | None
    finished_at: datetime | None
    recovered: bool = Field(description="true: it did not match when it fired, and was sent by a recovery")


class Attempt(ResponseBody):
    """One POST and what came back."""

    number: int | None = Field(description="null: a resend, which is not counted")
    resend: bool
    started_at: datetime
    duration_ms: int
    dns_ms: int | None = Field(
        description="null, as those that follow, on a kept connection or when it was not reached"
    )
    connect_ms: int | None
    tls_ms: int | None
    first_byte_ms: int | None = Field(description="from the start to the first byte of the answer")
    status: int | None
    error: str | None
    response_excerpt: str
    address: str | None


class DeliveryWithAttempts(Delivery):
    """A delivery with all its attempts, oldest first, and its newest resends among them."""

    attempt_log: list[Attempt]


class ResendAsked(ResponseBody):
    """One attempt will be made; its outcome is then among the attempts of the delivery."""

    event_id: str
    requested_at: datetime


class RecoveryAsked(ResponseBody):
    """How many events will be attempted, once each."""

    count: int
    next_since: int | None = Field(description="ask again from here on, for the rest of the range; null: that was all")


class TestAsked(ResponseBody):
    """What the receiver will get: `id` is the `id` of the envelope and the header `webhook-id`."""

    id: str
    event_type: str


class NewSecret(ResponseBody):
    """The only answer that holds the new secret."""

    secret_token: str
    previous_valid_until: datetime = Field(description="until then deliveries carry the signatures of both secrets")


class Event(BaseModel):
    """An event as webhooks receive it."""

    id: str
    account_ref_id: str
    staking_vault_id: str
    event_type: EventType
    severity: Literal["info", "warning", "error"]
    title: str
    message: str
    payload: dict[str, Any]
    created_at: int = Field(description="Unix epoch in milliseconds")


class InvalidField(ResponseBody):
    """One thing that is wrong with a request."""

    pointer: str = Field(description="JSON Pointer into the body (RFC 6901), or ?name for a query parameter")
    code: str
    detail: str


class ProblemBody(ResponseBody):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    message: str = Field(description="the same as detail")
    request_id: str
    errors: list[InvalidField] | None = None
