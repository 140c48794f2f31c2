"""The one HTTP exchange with upstreams: its deadlines, its cap, and errors that show neither the URL nor its cause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from vaultevents.chain.beacon.client import BeaconChain, BeaconOptions
from vaultevents.chain.upstream.http import Deadlines, HttpExchange, Request, asked_pause_s, new_session, read_body
from vaultevents.chain.upstream.node import Counters, NodeClient, RateLimited, TransientError, UpstreamTimeout
from vaultevents.core.errors import SourceUnavailable

pytestmark = pytest.mark.integration

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SECRET = "key-that-no-error-may-show"
PATIENT = Deadlines(connect_s=30.0, total_s=60.0)
CAP = 1000


@asynccontextmanager
async def serving(handler: Handler, deadlines: Deadlines = PATIENT) -> AsyncIterator[tuple[HttpExchange, Request]]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = NodeClient("node#1", "execution", Counters(), attempts=1, wait_s=0.0, set_aside_s=1.0)
        async with new_session(deadlines) as session:
            port = runner.addresses[0][1]
            yield HttpExchange(client, session, deadlines), Request("GET", f"http://127.0.0.1:{port}/{SECRET}")
    finally:
        await runner.cleanup()


async def body(response: aiohttp.ClientResponse) -> bytes | None:
    return await read_body(response, CAP)


async def problem_of(http: HttpExchange, request: Request) -> SourceUnavailable:
    with pytest.raises(SourceUnavailable) as caught:
        await http.fetch(request, body)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    assert SECRET not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(("size", "is_read"), [(0, True), (CAP, True), (CAP + 1, False), (50 * CAP, False)])
async def test_a_body_is_read_up_to_the_cap(size: int, is_read: bool) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b"x" * size)

    async with serving(answer) as (http, request):
        content = await http.fetch(request, body)
    assert content == (b"x" * size if is_read else None)
    assert http.client.counters.requests == 1


async def never(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"x")
    assert request.transport is not None
    while not request.transport.is_closing():
        await asyncio.sleep(0.02)
    return response


async def test_a_body_that_does_not_end_is_cut_off_by_the_deadline() -> None:
    async with serving(never, Deadlines(30.0, 0.5)) as (http, request):
        problem = await problem_of(http, request)
    assert isinstance(problem, UpstreamTimeout)
    assert problem.problem == "gives no whole answer within 0.5 s"


async def test_a_body_that_pauses_is_cut_off_by_the_idle_deadline() -> None:
    async with serving(never) as (http, request):
        with pytest.raises(UpstreamTimeout, match=r"sends nothing for 0\.5 s"):
            await http.fetch(request, body, Deadlines(30.0, 60.0, 0.5))


async def test_a_connection_that_breaks_is_a_passing_fault() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "100"})
        await response.prepare(request)
        await response.write(b"x")
        assert request.transport is not None
        request.transport.close()
        return response

    async with serving(answer) as (http, request):
        problem = await problem_of(http, request)
    assert isinstance(problem, TransientError)
    assert problem.problem == "breaks off in the middle of an answer"


async def test_a_node_that_is_gone_is_a_passing_fault(unused_tcp_port: int) -> None:
    async with serving(never) as (http, _):
        problem = await problem_of(http, Request("GET", f"http://127.0.0.1:{unused_tcp_port}/{SECRET}"))
    assert isinstance(problem, TransientError)
    assert problem.problem == "cannot be reached (ClientConnectorError)"


async def test_a_host_name_that_cannot_be_encoded_is_a_fault_of_its_node() -> None:
    url = f"http://{'a' * 70}.example/{SECRET}"
    async with serving(never) as (http, _):
        problem = await problem_of(http, Request("GET", url))
    assert problem.problem == "cannot be reached (UnicodeError)"
    async with BeaconChain([url], BeaconOptions(attempts=1)) as beacon:
        with pytest.raises(SourceUnavailable, match="cannot be reached"):
            await beacon.finality()


async def test_an_error_of_the_reader_is_not_taken_for_one_of_the_node() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b"x")

    async def fail(_: aiohttp.ClientResponse) -> None:
        raise ValueError("a bug")

    async with serving(answer) as (http, request):
        with pytest.raises(ValueError, match="a bug"):
            await http.fetch(request, fail)


async def test_statuses_and_the_pause_that_is_asked_for() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=429, headers={"retry-after": "7"})

    async def refuse(response: aiohttp.ClientResponse) -> None:
        raise http.status_error(response.status, "a problem", asked_pause_s(response))

    async with serving(answer) as (http, request):
        with pytest.raises(RateLimited) as caught:
            await http.fetch(request, refuse)
        assert caught.value.retry_after_s == 7.0
        assert isinstance(http.status_error(503, "a problem", 0.0), TransientError)
        assert type(http.status_error(403, "a problem", 0.0)) is SourceUnavailable


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_a_compressed_body_is_refused(encoding: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b"x", headers={"content-encoding": encoding})

    async def read(response: aiohttp.ClientResponse) -> bytes | None:
        http.check_plain(response)
        return await read_body(response, CAP)

    async with serving(answer) as (http, request):
        if encoding == "identity":
            assert await http.fetch(request, read) == b"x"
        else:
            with pytest.raises(SourceUnavailable, match="compresses its answers although it was asked not to"):
                await http.fetch(request, read)
