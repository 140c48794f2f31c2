"""Pages that follow the database: one reading and one rendering serve all browsers, a stream says when to refresh."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from vaultevents.console.context import ConsoleContext, in_time
from vaultevents.console.rendering import FRAGMENT_HEADER, render, render_text
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable

FRESH_S: Final = 2.0
"""Requests within this time share what was read and rendered."""

STREAM_S: Final = 300.0
"""A stream ends after this time; the browser opens another one, for which it has to be logged in still."""

BEAT_S: Final = 15.0
"""A stream without changes sends a comment so often, so that proxies keep it open."""

T = TypeVar("T")
Problem: TypeAlias = DatabaseUnavailable | DatabaseUnusable


class Shared(Generic[T]):
    """What one reader reads for all; at most one reading is under way."""

    def __init__(self, read: Callable[[], Awaitable[T]], fresh_s: float = FRESH_S) -> None:
        self._read = read
        self._fresh_s = fresh_s
        self._reading = asyncio.Lock()
        self._found: tuple[T] | Problem = DatabaseUnavailable("nothing was read yet")
        self._read_at_s = -fresh_s

    async def value(self) -> T:
        """Return what was read at most `fresh_s` ago, or raise why it could not be read."""
        async with self._reading:
            if time.monotonic() - self._read_at_s >= self._fresh_s:
                try:
                    self._found = (await in_time(self._read()),)
                except (DatabaseUnavailable, DatabaseUnusable) as problem:
                    self._found = problem
                self._read_at_s = time.monotonic()
            if isinstance(self._found, tuple):
                return self._found[0]
            raise self._found.with_traceback(None)


@dataclass(frozen=True, slots=True)
class Fragment:
    """The main part of a page, and a digest that changes with it."""

    html: Markup
    version: str


class LivePage:
    """A page that is the same for every session: `read` gives the values of its template."""

    def __init__(
        self,
        path: str,
        title: str,
        template: str,
        read: Callable[[], Awaitable[Mapping[str, Any]]],
        fresh_s: float = FRESH_S,
    ) -> None:
        self.path = path
        self.topic = path.strip("/") or "overview"
        self.fresh_s = fresh_s
        self._title = title
        self._template = template
        self._read = read
        self._shared = Shared(self._render, fresh_s)

    async def _render(self) -> Fragment:
        html = render_text(self._template, layout="fragment.html", **await self._read())
        return Fragment(Markup(html), hashlib.sha256(html.encode()).hexdigest()[:16])  # noqa: S704  # rendered here

    async def fragment(self) -> Fragment:
        """Return the present content. Raises `DatabaseUnavailable`."""
        return await self._shared.value()

    def route(self) -> Route:
        """Return the route of the page."""

        async def page(request: Request) -> Response:
            fragment = await self.fragment()
            if request.headers.get(FRAGMENT_HEADER):
                return Response(fragment.html, media_type="text/html")
            return render(request, "live.html", live=self.topic, title=self._title, fragment=fragment.html)

        return Route(self.path, page)


def stream_route(context: ConsoleContext, pages: Mapping[str, LivePage]) -> Route:
    """Return the route of `/live?page=…`: an event for each change of the page, for the script to load it again."""

    async def stream(request: Request) -> Response:
        page = pages.get(request.query_params.get("page", ""))
        if page is None:
            return PlainTextResponse("there is no such live page", 404)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return StreamingResponse(
            _changes(page, context.stop), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    return Route("/live", stream, methods=["GET"])


async def _changes(page: LivePage, stop: asyncio.Event) -> AsyncIterator[str]:
    began_s = sent_s = time.monotonic()
    seen = ""
    yield "retry: 2000\n\n"
    while not stop.is_set() and time.monotonic() - began_s < STREAM_S:
        try:
            version = (await page.fragment()).version
        except (DatabaseUnavailable, DatabaseUnusable):
            version = "away"
        if version != seen:
            if seen:
                yield f"event: changed\ndata: {version}\n\n"
                sent_s = time.monotonic()
            seen = version
        elif time.monotonic() - sent_s >= BEAT_S:
            yield ": beat\n\n"
            sent_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), page.fresh_s)
