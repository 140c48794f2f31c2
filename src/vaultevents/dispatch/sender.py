"""One POST to a receiver: vetted address, deadlines, no redirects (decisions D3, D4, D10, D12).

Whatever the receiver does is a `Reply`; an exception is a bug of ours or a cancellation.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import aiohttp

from vaultevents.core.errors import InputError
from vaultevents.core.timing import NO_TIMING, Timing
from vaultevents.egress import EgressRefused, Guard, open_session, peer

ErrorKind = Literal[
    "refused_url",
    "refused_address",
    "dns",
    "tls",
    "connect_timeout",
    "connect",
    "timeout",
    "reset",
    "protocol",
    "sealed",  # the webhook's secret cannot be opened: nothing was sent
]

HEADERS_LIMIT_BYTES: Final = 32 * 1024
BODY_LIMIT_BYTES: Final = 16 * 1024
EXCERPT_CHARS: Final = 256
RETRY_AFTER_CHARS: Final = 64

# The first that fits names the failure: special before general.
_KINDS: Final[tuple[tuple[type[Exception], ErrorKind], ...]] = (
    (InputError, "refused_url"),
    (EgressRefused, "refused_address"),
    (aiohttp.ClientConnectorDNSError, "dns"),
    (aiohttp.ClientSSLError, "tls"),
    (ssl.SSLError, "tls"),
    (aiohttp.ConnectionTimeoutError, "connect_timeout"),
    (aiohttp.ClientConnectorError, "connect"),
    (TimeoutError, "timeout"),
    (aiohttp.ServerDisconnectedError, "reset"),
    (OSError, "reset"),
    (aiohttp.ClientError, "protocol"),
)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: a `status` with complete headers, or the `error` that prevented one; exactly one of them is set.

    `retry_after` is that header's text, `excerpt` at most 256 printable characters of the body, `address` the one
    connected to. An attempt that failed after it was sent may have arrived: it is unknown, not refused.
    """

    status: int | None
    error: ErrorKind | None
    retry_after: str | None
    excerpt: str
    duration_ms: int
    address: str | None
    timing: Timing = NO_TIMING


class Sender:
    """Posts deliveries over connections kept per origin; an async context manager that owns its session."""

    def __init__(
        self,
        guard: Guard,
        *,
        ca_file: Path | None = None,
        connect_timeout_s: float = 5.0,
        total_timeout_s: float = 15.0,
    ) -> None:
        self._guard = guard
        self._ca_file = ca_file
        self._connect_timeout_s = connect_timeout_s
        self._total_timeout_s = total_timeout_s

    async def __aenter__(self) -> Self:
        self._session = open_session(self._guard, ca_file=self._ca_file, connect_timeout_s=self._connect_timeout_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def send(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """One attempt, over within the total deadline. The URL is judged anew by today's rules (D10)."""
        clock = asyncio.get_running_loop().time
        started = clock()
        deadline = started + self._total_timeout_s
        peer.set(None)
        status, error, retry_after, excerpt = None, None, None, ""
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._session.post(
                    self._guard.vet(url), data=body, headers=headers, allow_redirects=False
                )
        except (InputError, EgressRefused, aiohttp.ClientError, OSError) as failure:
            error = next(kind for error_type, kind in _KINDS if isinstance(failure, error_type))
        else:
            if _headers_bytes(response) > HEADERS_LIMIT_BYTES:
                response.close()
                error = "protocol"
            else:
                status = response.status
                retry_after = response.headers.get("Retry-After", "")[:RETRY_AFTER_CHARS] or None
                excerpt = await _excerpt(response, deadline)
        return Reply(status, error, retry_after, excerpt, round((clock() - started) * 1000), peer.get())


def _headers_bytes(response: aiohttp.ClientResponse) -> int:
    """The header block's size; the session limits single lines and their number, so it is bounded before this."""
    return sum(len(name) + len(value) + 4 for name, value in response.raw_headers)


async def _excerpt(response: aiohttp.ClientResponse, deadline: float) -> str:
    """The printable start of the body. Headers have decided already, so no failure in here changes the outcome (D3).

    A body that is not finished within 16 KiB and the deadline costs its connection; any other leaves it for reuse.
    """
    data = bytearray()
    finished = False
    try:
        async with asyncio.timeout_at(deadline):
            while response.status != 101 and len(data) < BODY_LIMIT_BYTES:
                chunk = await response.content.read(BODY_LIMIT_BYTES - len(data))
                if not chunk:
                    break
                data += chunk
            finished = response.status != 101 and response.content.at_eof()
    except (aiohttp.ClientError, OSError):
        pass
    finally:
        if finished:
            response.release()
        else:
            response.close()
    return _printable(bytes(data))


def _printable(data: bytes) -> str:
    text = data[: 4 * EXCERPT_CHARS].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else " " for c in text)[:EXCERPT_CHARS].strip()
