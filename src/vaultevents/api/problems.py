"""Errors as RFC 9457 problem details: one table of codes, one form, for ours and the framework's (rules A6 and A7)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import Response

from vaultevents import metrics

MEDIA_TYPE: Final = "application/problem+json"
MAX_ERRORS: Final = 10
"""How many of the errors of one request are named; the others are counted."""
MAX_DETAIL: Final = 300
"""Characters of the text of one error."""

CODES: Final[Mapping[str, tuple[int, str]]] = {
    "request_malformed": (400, "The request is not well-formed HTTP"),
    "json_malformed": (400, "The body is not strict JSON"),
    "body_not_allowed": (400, "This method takes no body"),
    "credentials_missing": (401, "Credentials are missing"),
    "credentials_invalid": (401, "API key or signature is wrong"),
    "token_malformed": (401, "The token is malformed"),
    "token_expired": (401, "The token is too old"),
    "token_not_yet_valid": (401, "The token is from the future"),
    "token_url_mismatch": (401, "The token is for another URL"),
    "token_body_mismatch": (401, "The token is for another body"),
    "token_nonce_invalid": (401, "The token's nonce is invalid"),
    "token_replayed": (401, "The token was used before"),
    "mfa_required": (401, "A step-up code is required"),
    "mfa_code_malformed": (401, "The step-up code is malformed"),
    "mfa_code_invalid": (401, "The step-up code is wrong"),
    "role_insufficient": (403, "The API key may only read"),
    "ip_not_allowed": (403, "The API key may not be used from this address"),
    "mfa_not_enrolled": (403, "The account has no second factor"),
    "not_found": (404, "There is no such thing"),
    "method_not_allowed": (405, "The method is not allowed here"),
    "request_timeout": (408, "The request did not arrive in time"),
    "idempotency_conflict": (409, "The Idempotency-Key was used for another request"),
    "webhook_limit_reached": (409, "The account has as many webhooks as it may"),
    "event_orphaned": (409, "The event's block is no longer on the chain"),
    "body_too_large": (413, "The body is too large"),
    "media_type_unsupported": (415, "The body must be JSON"),
    "validation_failed": (422, "The request is not valid"),
    "rate_limited": (429, "Too many requests"),
    "mfa_locked": (429, "Step-up is locked"),
    "headers_too_large": (431, "The header block is too large"),
    "internal_error": (500, "Something went wrong here"),
    "too_many_connections": (503, "Too many connections are open"),
    "unavailable": (503, "The service cannot answer now"),
}
"""Every code a client can meet, with its status and title. Codes are stable; titles and details are for people."""


DOCUMENTED: Final[dict[int | str, dict[str, Any]]] = {
    status: {
        "description": "; ".join(f"`{code}`" for code, (other, _) in CODES.items() if other == status),
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemBody"}}},
    }
    for status in sorted({status for status, _ in CODES.values()})
}
"""The same table as OpenAPI's `responses`."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """One thing that is wrong with a request: where (RFC 6901, or `?name` of the query), a code, a sentence."""

    pointer: str
    code: str
    detail: str


class Problem(Exception):
    """Ends a request with one of the codes above; `detail` says what the client should do."""

    def __init__(
        self, code: str, detail: str, *, errors: Sequence[Invalid] = (), headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.errors = tuple(errors)
        self.headers = dict(headers or {})
        self.status = CODES[code][0]


def validation_failed(errors: Sequence[Invalid], total: int | None = None) -> Problem:
    """Return one answer for what is wrong with a request: the first errors of `total`, each cut to a bounded size."""
    shown = [replace(error, detail=_cut(error.detail)) for error in errors[:MAX_ERRORS]]
    detail = "; ".join(error.detail for error in shown)
    more = (len(errors) if total is None else total) - len(shown)
    return Problem("validation_failed", f"{detail}; and {more} more" if more else detail, errors=shown)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else f"{text[:MAX_DETAIL]}…"


def too_many(code: str, detail: str, retry_after_s: int) -> Problem:
    """A 429 that says when to come back."""
    return Problem(code, detail, headers={"retry-after": str(max(1, retry_after_s))})


def body(problem: Problem, instance: str, request_id: str) -> bytes:
    """The problem as bytes; `message` repeats `detail` for clients that read that field (rule A6)."""
    status, title = CODES[problem.code]
    content: dict[str, Any] = {
        "type": f"/docs#{problem.code}",
        "title": title,
        "status": status,
        "detail": problem.detail,
        "instance": instance,
        "code": problem.code,
        "message": problem.detail,
        "requestId": request_id,
    }
    if problem.errors:
        content["errors"] = [
            {"pointer": error.pointer, "code": error.code, "detail": error.detail} for error in problem.errors
        ]
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def response(problem: Problem, instance: str, request_id: str) -> Response:
    """The answer to a request that ends with this problem; a 401 carries its challenge (RFC 6750, RFC 9470)."""
    metrics.refusal(problem.code)
    headers = dict(problem.headers)
    if problem.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = _challenge(problem.code)
    return Response(body(problem, instance, request_id), problem.status, headers, MEDIA_TYPE)


def _challenge(code: str) -> str:
    if code == "credentials_missing":
        return "Bearer"
    error = "insufficient_user_authentication" if code.startswith("mfa_") else "invalid_token"
    return f'Bearer error="{error}"'
