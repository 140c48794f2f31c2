"""The console of one process: its pages behind the guard, every error as a page."""

from __future__ import annotations

from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from vaultevents.console import (
    actions,
    audit,
    configuration,
    events,
    login,
    nodes,
    overview,
    replays,
    reports,
    streams,
    vaults,
    webhooks,
)
from vaultevents.console.access import Guard
from vaultevents.console.context import ConsoleContext
from vaultevents.console.live import stream_route
from vaultevents.console.rendering import database_away, render_message, static_file
from vaultevents.console.sessions import Sessions
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable, OperatorError, SourceUnavailable

STATIC: Final = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}


def build(context: ConsoleContext) -> ASGIApp:
    """Build the console."""
    sessions = Sessions(context.database)
    live_pages = [module.page(context) for module in (overview, streams, nodes, reports, audit)]
    routes = [
        *login.routes(sessions),
        *(page.route() for page in live_pages),
        *events.routes(context),
        *webhooks.routes(context),
        *vaults.routes(context),
        *actions.routes(context),
        *replays.routes(context),
        *configuration.routes(context),
        stream_route(context, {page.topic: page for page in (*live_pages, *configuration.check_changes(context))}),
        *(Route(f"/static/{name}", _static(name, kind)) for name, kind in STATIC.items()),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            DatabaseUnavailable: _away,
            DatabaseUnusable: _away,
            OperatorError: _wrong_input,
            SourceUnavailable: _node_away,
            HTTPException: _refused,
            Exception: _failed,
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, context.settings.console, sessions)


def _static(name: str, media_type: str) -> ASGIApp:
    headers = {"cache-control": "private, max-age=86400"}  # its URL changes with its content
    return Response(static_file(name), media_type=media_type, headers=headers)


async def _away(request: Request, _: Exception) -> Response:
    return database_away(request)


async def _wrong_input(request: Request, error: Exception) -> Response:
    return render_message(request, 400, "This cannot be done", f"{error}.")


async def _node_away(request: Request, error: Exception) -> Response:
    return render_message(request, 503, "A node does not answer", f"Nothing was done. {error}. Try again later.")


async def _refused(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return render_message(request, 404, "There is nothing here", "Choose a page from the navigation.")
    return render_message(request, status, "This cannot be done", "Choose a page from the navigation.")


async def _failed(request: Request, _: Exception) -> Response:
    return render_message(request, 500, "Something went wrong here", "The log of this process says what.")
