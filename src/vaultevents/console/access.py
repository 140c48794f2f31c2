"""Guard every route: host, origin, login, forms, and the headers that bind the browser (decision 0056)."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Message, Receive, Scope, Send

from vaultevents.config import ConsoleSettings
from vaultevents.console.rendering import database_away, render_message
from vaultevents.console.sessions import Sessions, csrf_token
from vaultevents.core.actor import acting_as
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable
from vaultevents.store.console_sessions import ConsoleSession

FORM: Final = "application/x-www-form-urlencoded"
MAX_FORM_BYTES: Final = 64 * 1024
MAX_FIELDS: Final = 100
LOGIN: Final = "/login"
STATIC: Final = "/static/"
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # "no-referrer" would make browsers send "Origin: null" with forms, which could then not be checked
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Access:
    """What the guard knows of a request. `secure`: the browser sent it by TLS."""

    secure: bool
    cookie: str
    secret: str | None = None
    session: ConsoleSession | None = None

    @property
    def csrf(self) -> str | None:
        return None if self.secret is None or self.session is None else csrf_token(self.secret)


def access_of(request: Request) -> Access:
    """Return what the guard found out about a request."""
    access: Access = request.scope["state"]["access"]
    return access


def form_of(request: Request) -> Mapping[str, str]:
    """Return the fields of a posted form; of a name that comes twice the last value."""
    form: Mapping[str, str] = request.scope["state"].get("form", {})
    return form


@dataclass(frozen=True, slots=True)
class Names:
    """The names under which browsers may ask for the console: others are those of DNS rebinding."""

    settings: ConsoleSettings

    def origins(self, scheme: str, server: tuple[str, int]) -> set[str]:
        """Return the origins of a listener at `server`, and the public one."""
        host, port = server
        at = f":{port}"
        suffixes = [at, ""] if port == {"http": 80, "https": 443}[scheme] else [at]
        hosts = {"127.0.0.1", "localhost", "[::1]", _bracketed(host), _bracketed(self.settings.host)}
        found = {f"{scheme}://{name.lower()}{suffix}" for name in hosts for suffix in suffixes}
        return found | ({self.settings.public_origin} if self.settings.public_origin else set())

    def is_known(self, host: str, scheme: str, server: tuple[str, int]) -> bool:
        return host.lower() in {origin.partition("://")[2] for origin in self.origins(scheme, server)}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class Guard:
    """Serve only requests that a logged-in browser meant for this console."""

    def __init__(self, app: Starlette, settings: ConsoleSettings, sessions: Sessions) -> None:
        self.routes = app.routes
        self._app = app
        self._settings = settings
        self._names = Names(settings)
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope.setdefault("state", {})
        with_headers = _sending(send)
        scope["state"]["access"] = self._access(scope)
        request = Request(scope, receive)
        try:
            refusal = await self._refusal(request)
        except (DatabaseUnavailable, DatabaseUnusable):
            refusal = database_away(request)
        except ClientDisconnect:
            return
        session = access_of(request).session
        with acting_as(f"console:{session.id}") if session else contextlib.nullcontext():
            await (refusal or self._app)(scope, receive, with_headers)

    def _access(self, scope: Scope) -> Access:
        headers = Headers(scope=scope)
        public = self._settings.public_origin or ""
        by_public = public.startswith("https://") and headers.get("host", "").lower() == public.partition("://")[2]
        secure = scope["scheme"] == "https" or by_public
        name = f"{'__Host-' if secure else ''}vaultevents_console_{scope['server'][1]}"
        return Access(secure, name, _cookie(headers.get("cookie", ""), name))

    async def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is not served, or None. Raises `DatabaseUnavailable`."""
        scope = request.scope
        path, method = scope["path"], scope["method"]
        if not self._names.is_known(request.headers.get("host", ""), scope["scheme"], scope["server"]):
            return render_message(
                request,
                421,
                "This address is not known",
                "The console does not answer to this name. Use the link that 'vaultevents console' prints, or set "
                "console.public_origin to the address in your browser.",
            )
        if self._settings.needs_proxy and scope["scheme"] != "https":
            return render_message(
                request,
                403,
                "This connection is not encrypted",
                "The console is served here only through the TLS proxy that console.trusted_proxies names: use its "
                "address, and let it send X-Forwarded-Proto.",
            )
        if method not in ("GET", "HEAD", "POST"):
            return Response(status_code=405, headers={"allow": "GET, HEAD, POST"})
        if method == "POST" and (refusal := self._foreign(request) or await _read_form(request)):
            return refusal
        if path.startswith(STATIC):
            _verify(request)
            return None
        if path == LOGIN:
            return None
        return await self._unknown(request)

    def _foreign(self, request: Request) -> Response | None:
        """Refuse what another site sent."""
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
        scope = request.scope
        if origin in self._names.origins(scope["scheme"], scope["server"]) and site == "same-origin":
            return None
        return render_message(
            request, 403, "This form came from another site", "Nothing was done. Open the page here and try again."
        )

    async def _unknown(self, request: Request) -> Response | None:
        """Find the session of the cookie; refuse a request without one, and a form of another session."""
        access = access_of(request)
        session = None if access.secret is None else await self._sessions.find(access.secret)
        if session is None:
            if request.method == "POST" or request.headers.get("x-fragment") or request.url.path == "/live":
                return render_message(
                    request,
                    401,
                    "You are not logged in",
                    "Nothing was done. Run 'vaultevents console' for a new link.",
                )
            return RedirectResponse(LOGIN, 303)
        known = Access(access.secure, access.cookie, access.secret, session)
        request.scope["state"]["access"] = known
        _verify(request)
        if request.method == "POST":
            given = form_of(request).get("csrf", "")
            if not hmac.compare_digest(given.encode(), (known.csrf or "").encode()):
                return render_message(
                    request, 403, "This form is out of date", "Nothing was done. Load the page again and repeat it."
                )
        return None


def _verify(request: Request) -> None:
    """Let the next request of the connection follow at once; the server delays it after what was refused."""
    if verification := request.scope["state"].get("verification"):
        verification.passed = True


async def _read_form(request: Request) -> Response | None:
    """Read the fields of a form into the state of the request; refuse what is none, or too large."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        return render_message(request, 415, "This is no form", f"Send {FORM}.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_FORM_BYTES:
            return render_message(request, 413, "This form is too large", f"Send at most {MAX_FORM_BYTES} bytes.")
    try:
        fields = parse_qsl(
            body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS, encoding="utf-8"
        )
    except ValueError:
        return render_message(request, 400, "This form cannot be read", "Load the page again and repeat it.")
    request.scope["state"]["form"] = dict(fields)
    return None


def _cookie(header: str, name: str) -> str | None:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return None
    return None if found is None else found.value


def _sending(send: Send) -> Send:
    """Add the headers to every answer."""

    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return with_headers
