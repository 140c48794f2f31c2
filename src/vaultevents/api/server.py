"""The HTTP server inside the daemon: uvicorn on a socket that was bound before anything else began (rule A20)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from ipaddress import IPv4Network, ip_network
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from vaultevents.api import connection
from vaultevents.api.admission import Acceptor, ConnectionLimits, Slot, Transport
from vaultevents.api.connection import ARRIVAL_S, READ_BYTES, BoundedProtocol, SmallReads
from vaultevents.api.problems import Problem
from vaultevents.core.errors import ConfigError

BACKLOG = 2048
DRAIN_S = 8
KERNEL_BYTES = 64 * 1024
"""What the kernel may keep of a connection in each direction (Linux doubles it for its own use)."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen, with what certificate, and which peers may tell a client's address (`X-Forwarded-For`).

    `what` listens there by the settings of `table`, for messages. At most `max_connections` are open, and
    `connections_per_address` from one peer that is no trusted proxy. An answer may stay unread for `answer_s`.
    """

    host: str = "127.0.0.1"
    port: int = 8420
    certificate_file: Path | None = None
    key_file: Path | None = None
    trusted_proxies: tuple[str, ...] = ()
    what: str = "the API"
    table: str = "api"
    max_connections: int = 1000
    connections_per_address: int = 100
    answer_s: float = 10.0


def bind(options: ServerOptions) -> socket.socket:
    """A listening socket; raises `ConfigError` when the address is taken or not ours."""
    try:
        family, *_, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # with its protocol, or asyncio does not know that it is TCP and lets answers wait for acknowledgements
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for direction in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # of every connection, else megabytes for each
                listener.setsockopt(socket.SOL_SOCKET, direction, KERNEL_BYTES)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        # asyncio and socket put words of their own around the system's; a name that is not found has only these
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(
            f"{options.what} cannot listen on {options.host} port {options.port} ({why}): name another "
            f"address in {options.table}.host and {options.table}.port, or end what uses it"
        ) from None


def url_of(listener: socket.socket, options: ServerOptions) -> str:
    """Where a client on this machine reaches it."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.certificate_file is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


async def serve(
    app: ASGIApp, listener: socket.socket, options: ServerOptions, now_s: Callable[[], float], stop: asyncio.Event
) -> None:
    """Answers requests until `stop` is set, then finishes those under way."""
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=bool(options.trusted_proxies),
        forwarded_allow_ips=_in_both_families(options.trusted_proxies),
        timeout_graceful_shutdown=DRAIN_S,
        timeout_keep_alive=75,
        ssl_certfile=options.certificate_file,
        ssl_keyfile=options.key_file,
    )
    try:
        config.load()
    except OSError as error:  # SSLError is one
        raise ConfigError(
            f"{options.table}.certificate_file and {options.table}.key_file cannot be used "
            f"({error.strerror or error}): name a PEM certificate chain and its key"
        ) from None
    server = _Server(config, options, now_s)
    ending = asyncio.create_task(_exit_on(stop, server))
    try:
        await server.serve([listener])
    finally:
        ending.cancel()


def _in_both_families(networks: Sequence[str]) -> list[str]:
    """The networks, and those of IPv4 as a socket for both families shows them (RFC 4291 §2.5.5.2)."""
    four = [network for network in map(ip_network, networks) if isinstance(network, IPv4Network)]
    mapped = [f"::ffff:{network.network_address}/{96 + network.prefixlen}" for network in four]
    return [*networks, *mapped]


async def _exit_on(stop: asyncio.Event, server: uvicorn.Server) -> None:
    await stop.wait()
    server.should_exit = True


_FULL = Problem("too_many_connections", "too many connections are open: close some", headers={"retry-after": "1"})


class _Server(uvicorn.Server):
    """Leaves signals to the daemon, dates its answers by the service clock (rule D15), and bounds its connections."""

    def __init__(self, config: uvicorn.Config, options: ServerOptions, now_s: Callable[[], float]) -> None:
        super().__init__(config)
        self._options = options
        self._now_s = now_s
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._accepting: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, without asyncio's server: that one accepts until there are no descriptors left."""
        await self.lifespan.startup()
        options = self._options
        limits = ConnectionLimits(
            options.max_connections,
            options.connections_per_address,
            tuple(map(ip_network, options.trusted_proxies)),
        )
        transport = Transport(self.config.ssl, handshake_s=ARRIVAL_S, close_s=options.answer_s)
        self.servers = []
        self._accepting = [
            asyncio.create_task(Acceptor(listener, limits, transport, self._connect, self._refusal).run())
            for listener in sockets or ()
        ]
        self.started = True

    def _connect(self, slot: Slot) -> SmallReads:
        protocol = BoundedProtocol(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            slot=slot,
            answer_s=self._options.answer_s,
        )
        return SmallReads(protocol, self._buffer)

    def _refusal(self) -> bytes:
        return connection.answer(_FULL, self.server_state.default_headers)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        ends = await super().on_tick(counter)
        for task in self._accepting:
            if task.done():
                task.result()  # accepting ends only with an error of ours
        date = formatdate(self._now_s(), usegmt=True).encode()
        self.server_state.default_headers = [(b"date", date)]
        return ends
