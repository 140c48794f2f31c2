"""New heads over WebSocket, as a hint and nothing else (rule I10).

What a socket says is not read: each message means that somebody may look at the nodes sooner than the next poll. So a
socket that is dead, frozen or lying costs at most the poll interval, and one of another network costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec
import structlog

from vaultevents.chain.upstream import hex_values
from vaultevents.chain.upstream.node import reconnect_pauses
from vaultevents.chain.upstream.redaction import node_name, scrub
from vaultevents.core.errors import SourceUnavailable

_log = structlog.get_logger()

SCHEMES = ("ws", "wss")
_CLOSE_S = 0.5
_BEFORE_AN_ANSWER = 8
"""So many announcements may come before the answer to a call."""


@dataclass(frozen=True, slots=True)
class SocketTerms:
    """How a socket is treated.

    `answer_s`: for its connection and for its answers. `quiet_s`: without a message it is given up, because a
    subscription may end while the socket lives on. `spacing_s`: between two hints, however many messages come.
    """

    answer_s: float = 10.0
    quiet_s: float = 120.0
    spacing_s: float = 0.1
    message_bytes: int = 2**20


class _SubscriptionMessage(msgspec.Struct):
    id: int | str | float | None = None
    result: str | int | None = None


_ANSWER = msgspec.json.Decoder(_SubscriptionMessage)


class NewHeads:
    """The heads that one node announces. `name` is its redacted name; raises `InputError` for an unusable URL."""

    def __init__(self, url: str, terms: SocketTerms | None = None) -> None:
        self.name = node_name(url, SCHEMES)
        self._url = url
        self._terms = terms or SocketTerms()
        self._ids = itertools.count(1)

    async def follow(self, on_head: Callable[[], None]) -> None:
        """Calls `on_head` for each announcement, for ever; a socket that ends is opened anew after a growing pause."""
        pauses = reconnect_pauses()

        def announced() -> None:
            nonlocal pauses
            pauses = reconnect_pauses()
            on_head()

        while True:
            try:
                await self._listen(announced)
            except SourceUnavailable as ended:
                pause = next(pauses)
                _log.warning("newheads_lost", node=self.name, problem=ended.problem, retry_in_s=pause)
                await asyncio.sleep(pause)

    async def chain_id(self, *, head_within_s: float | None = None) -> int:
        """Return the chain of the node, which also has to take the subscription. Raises `SourceUnavailable`.

        With `head_within_s` the node also has to announce a block within that time.
        """
        async with self._connected() as socket:
            await self._call(socket, "eth_subscribe", "newHeads")
            number = hex_values.quantity(self.name, "the chain id", await self._call(socket, "eth_chainId"))
            if head_within_s is not None:
                await self._message(socket, head_within_s, f"has announced no block for {head_within_s:g} s")
            return number

    async def _listen(self, on_head: Callable[[], None]) -> None:
        """Never returns: raises `SourceUnavailable` when the socket ends or is quiet for too long."""
        terms = self._terms
        async with self._connected() as socket:
            await self._call(socket, "eth_subscribe", "newHeads")
            _log.info("newheads_followed", node=self.name)
            while True:
                await self._message(socket, terms.quiet_s, f"has announced no block for {terms.quiet_s:g} s")
                on_head()
                await asyncio.sleep(terms.spacing_s)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        terms, problem = self._terms, ""
        redirects = aiohttp.TraceConfig()
        redirects.on_request_redirect.append(_refuse)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=terms.answer_s)
        try:
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(resolver=aiohttp.ThreadedResolver()),
                    timeout=timeout,
                    trust_env=False,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    trace_configs=[redirects],
                ) as session,
                asyncio.timeout(terms.answer_s) as deadline,
                session.ws_connect(
                    self._url,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                    heartbeat=terms.answer_s,
                    max_msg_size=terms.message_bytes,
                ) as socket,
            ):
                deadline.reschedule(None)
                try:
                    yield socket
                finally:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_CLOSE_S):
                            await socket.close()
        except TimeoutError:
            problem = f"opens no WebSocket within {terms.answer_s:g} s"
        except aiohttp.WSServerHandshakeError as error:
            problem = f"refuses a WebSocket with HTTP status {error.status}"
        except (aiohttp.ClientError, OSError) as error:
            problem = f"cannot be reached ({type(error).__name__})"
        if problem:  # outside of the handler: aiohttp's exceptions carry the URL
            raise SourceUnavailable(self.name, problem)

    async def _call(self, socket: aiohttp.ClientWebSocketResponse, method: str, *params: str) -> str:
        """The answer to the only question that is open; announcements may come before it."""
        number = next(self._ids)
        asked = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        await socket.send_str(msgspec.json.encode(asked).decode())
        slow = f"does not answer {method} within {self._terms.answer_s:g} s"
        for _ in range(_BEFORE_AN_ANSWER):
            text = await self._message(socket, self._terms.answer_s, slow)
            try:
                answer = _ANSWER.decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                answer = _SubscriptionMessage()
            if answer.id == number and answer.result is not None:
                return str(answer.result)
            if answer.id == number:
                break
        raise SourceUnavailable(self.name, f"refuses {method}: {scrub(text, self._url)}")

    async def _message(self, socket: aiohttp.ClientWebSocketResponse, within_s: float, slow: str) -> str:
        try:
            async with asyncio.timeout(within_s):
                message = await socket.receive()
        except TimeoutError:
            problem = slow
        else:
            if message.type is aiohttp.WSMsgType.TEXT:
                return str(message.data)
            problem = f"closes its WebSocket (code {socket.close_code})"
        raise SourceUnavailable(self.name, problem)


async def _refuse(*_: object) -> None:
    raise aiohttp.ClientConnectionError("redirects are not followed")
