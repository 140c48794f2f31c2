"""One HTTP server on 127.0.0.1: what the nodes and the receivers have in common, also when they fail."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

from vaultevents.devnet.faults import Fault

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_GRACE_S = 0.2
_WEB_PAGE = "<!doctype html><title>Sign in</title><h1>Welcome to the network</h1>"


class LoopbackServer:
    """Serves `handler`; a handler is cancelled when its client leaves."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None = None) -> None:
        server = web.Server(handler, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=_GRACE_S)
        self._tls = tls

    async def start(self, port: int = 0) -> str:
        """Listen, on a free port unless one is named; returns the origin, such as `http://127.0.0.1:41234`."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=self._tls).start()
        host, port = self._runner.addresses[0][:2]
        return f"{'https' if self._tls else 'http'}://{host}:{port}"

    async def stop(self) -> None:
        """Close the listener and every connection, cutting off answers that hang."""
        await self._runner.cleanup()


async def outage(kind: Fault | None, slow_s: float) -> web.Response | None:
    """The answer of a server that fails in one of `TRANSPORT_FAULTS`; None where the right answer is to follow."""
    match kind:
        case Fault.HTTP_500:
            return web.Response(status=500, text="internal server error")
        case Fault.HTTP_429:
            return web.Response(status=429, text="too many requests", headers={"Retry-After": "1"})
        case Fault.HTML:
            return web.Response(text=_WEB_PAGE, content_type="text/html")
        case Fault.SLOW:
            await asyncio.sleep(slow_s)
        case Fault.HANG:
            await asyncio.Event().wait()
    return None
