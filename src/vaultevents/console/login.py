"""Log a browser in with a link of `vaultevents console`, and out again."""

from __future__ import annotations

import math
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from vaultevents.api.limits import Buckets, Rate
from vaultevents.console.access import access_of, form_of
from vaultevents.console.rendering import render
from vaultevents.console.sessions import Sessions
from vaultevents.store.console_sessions import SESSION_VALID_S

WRONG_CODES: Final = Rate(per_minute=6, burst=6)
"""For each address: wrong codes within a minute, after which it has to wait."""

MAX_CODE: Final = 2000
"""A whole link may be pasted."""

_WRONG: Final = (
    "This link was used already, is older than 10 minutes, or is not one of this console. "
    "Run 'vaultevents console' again for a new one."
)


def routes(sessions: Sessions) -> list[Route]:
    """Return the routes of login and logout."""
    wrong_codes = Buckets(WRONG_CODES)

    async def show(request: Request) -> Response:
        return render(request, "login.html", problem=None)

    async def login(request: Request) -> Response:
        address = request.client.host if request.client else ""
        if wait_s := wrong_codes.wait_s(address):
            response = render(
                request, "login.html", 429, problem=f"Too many wrong links: wait {math.ceil(wait_s)} seconds."
            )
            response.headers["retry-after"] = str(math.ceil(wait_s))
            return response
        # the link has the code behind its '#'
        code = form_of(request).get("code", "")[:MAX_CODE].strip().rpartition("#")[2]
        secret = await sessions.begin(code) if code else None
        if secret is None:
            wrong_codes.take(address)
            return render(request, "login.html", 403, problem=_WRONG)
        access = access_of(request)
        if access.secret is not None:
            await sessions.end(access.secret)
        response = RedirectResponse("/", 303)
        response.set_cookie(
            access.cookie, secret, SESSION_VALID_S, path="/", secure=access.secure, httponly=True, samesite="strict"
        )
        return response

    async def logout(request: Request) -> Response:
        access = access_of(request)
        assert access.secret is not None  # the guard lets no other request through
        await sessions.end(access.secret)
        response = RedirectResponse("/login", 303)
        response.delete_cookie(access.cookie, path="/", secure=access.secure, httponly=True, samesite="strict")
        return response

    return [
        Route("/login", show, methods=["GET"]),
        Route("/login", login, methods=["POST"]),
        Route("/logout", logout, methods=["POST"]),
    ]
