"""Which connections a listener accepts: bounded in all and for each peer address; idle ones end first.

A connection is idle unless a complete request is handled. When the bound is reached, the connection that has been idle
longest is closed for a new one. Where none is idle, nothing is accepted until a request is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final, TypeAlias

import structlog

from vaultevents.api.limits import neighbourhood, plain_address

log = structlog.get_logger("api")

Network: TypeAlias = IPv4Network | IPv6Network

ACCEPT_PAUSE_S: Final = 0.1
"""After an accept that found no descriptor or no memory."""
CLOSE_S: Final = 0.01
"""Within this time the descriptor of a closed connection is free."""
LOG_EVERY_S: Final = 60.0
NO_ROOM: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections may be open, in all and from one address; addresses of `exempt` count only in all."""

    total: int = 1000
    per_address: int = 100
    exempt: tuple[Network, ...] = ()


class Slot:
    """The place of one connection in the table."""

    def __init__(self, table: ConnectionTable, source: str | None) -> None:
        self.source = source
        self._table = table
        self._end: Callable[[], object] | None = None

    def opened(self, end: Callable[[], object]) -> None:
        """Name the function that ends the connection at once."""
        self._end = end

    def idle(self) -> None:
        """Note that no request is handled."""
        self._table.note_idle(self)

    def busy(self) -> None:
        """Note that a request is handled."""
        self._table.note_busy(self)

    def release(self) -> None:
        """Note that the connection has ended."""
        self._end = None
        self._table.remove(self)

    def evict(self) -> None:
        """End the connection at once."""
        end = self._end
        self.release()
        if end is not None:
            end()


class ConnectionTable:
    """The open connections of one listener, and which of them are idle, longest first."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: set[Slot] = set()
        self._idle: dict[Slot, None] = {}
        self._of: defaultdict[str, int] = defaultdict(int)
        self._idle_of: defaultdict[str, dict[Slot, None]] = defaultdict(dict)
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, address: str) -> Slot | None:
        """Return a slot for a new connection, which may end an idle one; None when there is no room."""
        source = self._source(address)
        if source is not None and self._of[source] >= self._limits.per_address:
            if not _evict_first(self._idle_of[source]):
                return None
        elif len(self._open) >= self._limits.total and not _evict_first(self._idle):
            return None
        slot = Slot(self, source)
        self._open.add(slot)
        if source is not None:
            self._of[source] += 1
        self.note_idle(slot)
        return slot

    def evict_idle(self) -> bool:
        """End the connection that has been idle longest; False when there is none."""
        return _evict_first(self._idle)

    async def room(self) -> None:
        """Wait until a connection can be admitted."""
        while len(self._open) >= self._limits.total and not self._idle:
            self._room.clear()
            await self._room.wait()

    def note_idle(self, slot: Slot) -> None:
        if slot in self._open:
            self.note_busy(slot)  # it becomes the newest
            self._idle[slot] = None
            if slot.source is not None:
                self._idle_of[slot.source][slot] = None
            self._room.set()

    def note_busy(self, slot: Slot) -> None:
        self._idle.pop(slot, None)
        if slot.source is not None and slot.source in self._idle_of:
            self._idle_of[slot.source].pop(slot, None)

    def remove(self, slot: Slot) -> None:
        if slot not in self._open:
            return
        self.note_busy(slot)
        self._open.discard(slot)
        if slot.source is not None:
            self._of[slot.source] -= 1
            if not self._of[slot.source]:
                del self._of[slot.source]
                self._idle_of.pop(slot.source, None)
        self._room.set()

    def _source(self, address: str) -> str | None:
        try:
            parsed = plain_address(ip_address(address))
        except ValueError:
            return address
        return None if any(parsed in network for network in self._limits.exempt) else neighbourhood(parsed)


def _evict_first(idle: dict[Slot, None]) -> bool:
    slot = next(iter(idle), None)
    if slot is None:
        return False
    slot.evict()
    return True


@dataclass(frozen=True, slots=True)
class Transport:
    """How accepted sockets become connections: over TLS where `tls` is given, with these times in seconds."""

    tls: ssl.SSLContext | None
    handshake_s: float
    close_s: float


class Acceptor:
    """Accept connections on one listener while the table has room.

    `connect` makes the protocol of a connection; a peer that gets none is sent `refusal()`, unless it speaks TLS.
    """

    def __init__(
        self,
        listener: socket.socket,
        limits: ConnectionLimits,
        transport: Transport,
        connect: Callable[[Slot], asyncio.BaseProtocol],
        refusal: Callable[[], bytes],
    ) -> None:
        self._listener = listener
        self._table = ConnectionTable(limits)
        self._transport = transport
        self._connect = connect
        self._refusal = refusal
        self._opening: set[asyncio.Task[None]] = set()
        self._logged_at_s = -LOG_EVERY_S

    async def run(self) -> None:
        """Accept until it is cancelled."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        try:
            while True:
                try:
                    peer, address = await loop.sock_accept(self._listener)
                except OSError as error:
                    await self._recover(error)
                    continue
                with contextlib.ExitStack() as stack:
                    stack.callback(peer.close)
                    await self._table.room()  # the next ones wait in the kernel
                    stack.pop_all()
                self._open(peer, address)
        finally:
            for task in self._opening:
                task.cancel()

    async def _recover(self, error: OSError) -> None:
        """Wait where descriptors or memory are missing; any other error is that of one peer."""
        if error.errno in NO_ROOM:
            self._log_full(str(error.strerror))
            evicted = self._table.evict_idle()
            await asyncio.sleep(CLOSE_S if evicted else ACCEPT_PAUSE_S)

    def _open(self, peer: socket.socket, address: Sequence[object]) -> None:
        slot = self._table.admit(str(address[0]))
        if slot is None:
            self._log_full("no connection is idle")
            with contextlib.suppress(OSError), peer:
                if self._transport.tls is None:
                    peer.send(self._refusal())
            return
        task = asyncio.create_task(self._begin(peer, slot))
        slot.opened(task.cancel)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _begin(self, peer: socket.socket, slot: Slot) -> None:
        tls = self._transport.tls
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connect(slot),
                peer,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else self._transport.handshake_s,
                ssl_shutdown_timeout=None if tls is None else self._transport.close_s,
            )
        except BaseException as error:
            slot.release()
            with contextlib.suppress(OSError):
                peer.close()
            if not isinstance(error, OSError):  # a peer that ends in the handshake is no news
                raise

    def _log_full(self, why: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_at_s >= LOG_EVERY_S:
            self._logged_at_s = now_s
            log.warning("connections_refused", open=len(self._table), why=why)
