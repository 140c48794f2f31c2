"""One HTTP server on 127.0.0.1: what the execution node and the receivers have in common."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_GRACE_S = 0.2


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
