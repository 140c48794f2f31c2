"""Render templates: every value is escaped, and one that is missing is an error."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import vaultevents
from vaultevents.console.links import account_url, event_url, vault_url, webhook_url, with_query
from vaultevents.console.navigation import PAGES

FRAGMENT_HEADER: Final = "x-fragment"
"""A request with this header gets the block `main` alone, for the script that refreshes a page."""

RETRY_S: Final = 5


def render(request: Request, name: str, status: int = 200, *, live: str | None = None, **values: Any) -> Response:
    """Render a template that extends `layout`, with the navigation and `csrf_field` of the session.

    `live` is the topic of `/live` whose changes refresh the page.
    """
    access = request.scope["state"]["access"]
    csrf = access.csrf
    field = "" if csrf is None else Markup('<input type="hidden" name="csrf" value="{}">').format(csrf)
    content = render_text(
        name,
        layout="fragment.html" if request.headers.get(FRAGMENT_HEADER) else "base.html",
        csrf_field=field,
        session=access.session,
        path=request.scope["path"],
        live=live,
        **{"refresh_s": None, **values},
    )
    return HTMLResponse(content, status)


def render_text(name: str, **values: Any) -> str:
    """Render a template to text."""
    return environment().get_template(name).render(**values)


def render_message(request: Request, status: int, title: str, text: str, refresh_s: int | None = None) -> Response:
    """Render a page with a title and a sentence that says what to do."""
    return render(request, "message.html", status, heading=title, text=text, refresh_s=refresh_s)


def database_away(request: Request) -> Response:
    """Say that the database cannot answer; the page loads itself again until it does."""
    response = render_message(
        request,
        503,
        "The database does not answer",
        f"Nothing can be shown until it is back. This page tries again every {RETRY_S} seconds.",
        refresh_s=RETRY_S,
    )
    response.headers["retry-after"] = str(RETRY_S)
    return response


@cache
def environment() -> Environment:
    """Return the templates with their filters."""
    made = Environment(
        loader=PackageLoader("vaultevents.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.globals |= {"pages": PAGES, "version": vaultevents.__version__, "static": static_url}
    made.globals |= {found.__name__: found for found in (event_url, webhook_url, account_url, vault_url, with_query)}
    made.filters |= {"time": time_text, "age": age_text, "number": number_text, "share": share_text}
    return made


@cache
def static_file(name: str) -> bytes:
    """Return the content of a file in `static`."""
    return resources.files("vaultevents.console").joinpath("static", name).read_bytes()


@cache
def static_url(name: str) -> str:
    """Return the path of a file in `static`, which changes with its content."""
    return f"/static/{name}?v={hashlib.sha256(static_file(name)).hexdigest()[:12]}"


def time_text(moment: datetime | None) -> Markup:
    """Show a time in UTC, to the second."""
    if moment is None:
        return Markup("–")
    moment = moment.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        moment.isoformat(timespec="seconds"), moment.strftime("%Y-%m-%d %H:%M:%S")
    )


def age_text(seconds: float | None) -> str:
    """Show a duration in its largest units: `3 d 4 h`, `5 min`, `12 s`, `40 ms`."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, days = minutes // 60, minutes // 1440
    return f"{hours} h {minutes % 60} min" if days < 1 else f"{days} d {hours % 24} h"


def number_text(number: float | None) -> str:
    """Show a number with thin spaces between its thousands."""
    return "–" if number is None else f"{number:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def share_text(share: float | None) -> str:
    """Show a share in per cent; never 100 % for what is less."""
    if share is None:
        return "–"
    text = f"{share * 100:.1f}"
    return f"{'>99.9' if text == '100.0' and share < 1 else text.removesuffix('.0')} %"
