"""The application: routes behind the gate, every error as a problem, and its own description (rules A6 and A19)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import vaultevents
from vaultevents.api import problems
from vaultevents.api.actions import add_actions
from vaultevents.api.auth import AuthMiddleware, unavailable
from vaultevents.api.documentation import describe, page
from vaultevents.api.handlers import ApiContext, add_routes
from vaultevents.api.limits import AccountBusy
from vaultevents.api.problems import MAX_ERRORS, Invalid, Problem, too_many, validation_failed
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable, VaulteventsError
from vaultevents.core.pagination import CursorUnknown
from vaultevents.store.apikeys import KeyRing
from vaultevents.store.authorized_transaction import StepUpRefused, TokenReplayed
from vaultevents.store.webhook_management import IdempotencyConflict, TooManyWebhooks
from vaultevents.store.webhooks import WebhookUnknown


def build(desk: ApiContext, ring: KeyRing) -> ASGIApp:
    """The whole API of one process."""
    return AuthMiddleware(application(desk), ring, desk.hash_key, desk.token_rules, desk.rate, desk.now_s)


def application(desk: ApiContext) -> FastAPI:
    """What stands behind the gate: it believes the `Caller` that comes with a request."""
    app = FastAPI(
        title="vaultevents",
        version=vaultevents.__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        responses=problems.DOCUMENTED,
    )
    app.router.redirect_slashes = False
    add_routes(app, desk)
    add_actions(app, desk)
    description = describe(app)
    for path, content, media_type in (
        ("/v1/openapi.json", description, "application/json"),
        ("/docs", page(description), "text/html"),
    ):
        app.add_route(path, _static(content, media_type), include_in_schema=False)
    for kind in (RequestValidationError, HTTPException, Problem, VaulteventsError, Exception):
        app.add_exception_handler(kind, _answer)
    return app


def _static(content: bytes, media_type: str) -> Callable[[Request], Response]:
    return lambda request: Response(content, media_type=media_type)


async def _answer(request: Request, error: Exception) -> Response:
    problem, path = _problem(error), request.scope["path"]
    if problem.code == "method_not_allowed":
        problem.headers["allow"] = ", ".join(_methods(request.app, path))
    return problems.response(problem, path, request.scope["state"]["request_id"])


def _methods(app: FastAPI, path: str) -> list[str]:
    """All methods of a path; the framework names those of the first route alone (RFC 9110 §10.2.1)."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.path_regex.match(path)]
    return sorted({method for route in routes for method in route.methods or ()})


def _problem(error: Exception) -> Problem:
    """Every exception that can end a request, as the problem that the client sees."""
    match error:
        case Problem():
            return error
        case RequestValidationError():
            found = error.errors()
            return validation_failed([_invalid(part) for part in found[:MAX_ERRORS]], len(found))
        case HTTPException(status_code=404):
            return Problem("not_found", "there is nothing at this path: see /docs")
        case HTTPException(status_code=405):
            return Problem("method_not_allowed", "this path does not take that method: see the Allow header")
        case HTTPException(status_code=400):
            return Problem("json_malformed", "the body is not JSON")
        case CursorUnknown():
            return validation_failed([Invalid("?cursor", "cursor_unknown", str(error))])
        case WebhookUnknown():
            return Problem("not_found", "there is no such webhook")
        case TooManyWebhooks():
            return Problem("webhook_limit_reached", str(error))
        case IdempotencyConflict():
            return Problem("idempotency_conflict", str(error))
        case TokenReplayed():
            return Problem("token_replayed", "a token is good for one request: sign each one with a new nonce")
        case StepUpRefused(reason="locked", retry_after_s=seconds):
            return too_many("mfa_locked", str(error), seconds or 1)
        case StepUpRefused(reason=reason):
            return Problem(_STEP_UP[reason], str(error))
        case AccountBusy():
            return too_many("rate_limited", str(error), 1)
        case DatabaseUnavailable() | DatabaseUnusable():
            return unavailable()
    return Problem("internal_error", "something went wrong here; tell the operator the requestId")


_STEP_UP: Final = {
    "not_enrolled": "mfa_not_enrolled",
    "required": "mfa_required",
    "malformed": "mfa_code_malformed",
    "invalid": "mfa_code_invalid",
}

_CODES: Final[Mapping[str, tuple[str, str]]] = {
    "missing": ("required", "is required"),
    "extra_forbidden": ("unknown_field", "is not a field that can be set here"),
    "too_short": ("empty", "is empty, so nothing would ever be sent: name one, or send null for all"),
    "string_type": ("invalid", "has to be a text"),
    "string_too_long": ("invalid", "is too long: send at most {max_length} characters"),
    "bool_type": ("invalid", "has to be true or false"),
    "list_type": ("invalid", "has to be a list"),
    "model_type": ("invalid", "has to be a JSON object"),
    "model_attributes_type": ("invalid", "has to be a JSON object"),
    "int_type": ("invalid", "has to be a whole number"),
    "int_parsing": ("invalid", "has to be a whole number"),
    "int_parsing_size": ("invalid", "is too large"),
    "greater_than_equal": ("invalid", "has to be at least {ge}"),
    "less_than": ("invalid", "has to be less than {lt}"),
    "less_than_equal": ("invalid", "has to be at most {le}"),
    "literal_error": ("invalid", "has to be {expected}"),
}
"""What pydantic calls an error: our code, and the end of a sentence that begins with the field."""

_HEADERS: Final[Mapping[str, str]] = {
    "idempotency-key": "the header Idempotency-Key has to be 1 to 255 printable ASCII characters without a space",
}


def _invalid(error: Mapping[str, Any]) -> Invalid:
    """One of pydantic's errors, without the value that was sent."""
    place, *path = error["loc"]
    if place == "header":
        return Invalid("", "header_invalid", _HEADERS[path[0]])
    if place == "body":
        pointer = "".join(f"/{_escaped(str(part))}" for part in path)
        name = ".".join(str(part) for part in path) or "the body"
    else:
        pointer = name = f"?{path[0]}"
    code, text = _CODES.get(error["type"], ("invalid", "is not what is taken here: see /docs"))
    return Invalid(pointer, code, f"{name[:80]} {text.format_map(error.get('ctx', {}))}")


def _escaped(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")[:80]
