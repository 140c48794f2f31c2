"""A separate network for tests of where a sender connects: a public receiver, private canaries, scripted names.

Where the kernel lets us, the scenario runs in a network namespace without a way out, in which the canaries have their
true addresses. Elsewhere those on loopback listen, and a dial to any other address is noted and fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.certificates import Authority

PUBLIC = ("127.0.0.2", "127.0.0.3")
"""They stand for the receiver's public addresses: the only ones that the rules of the scenario allow."""
ON_LOOPBACK = ("127.0.0.1", "::1")
ELSEWHERE = ("169.254.169.254", "10.1.2.3", "fd00:ec2::254")
CANARIES = ON_LOOPBACK + ELSEWHERE
RULES = UrlRules(allow=(parse_allow("127.0.0.2/31:*"),))
DOMAIN = "receiver.example"

_CLONE_NEWNET = 0x40000000

Found = Sequence[str] | OSError
"""What a look-up finds, or how it fails."""


class WatchedLoop(asyncio.SelectorEventLoop):
    """Notes every address that is dialled; outside of a namespace nothing that is not loopback is."""

    def __init__(self) -> None:
        super().__init__()
        self.dials: list[str] = []
        self.isolated = False

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        self.dials.append(address[0])
        if not self.isolated and not (address[0] == "::1" or address[0].startswith("127.")):
            raise OSError(errno.EHOSTUNREACH, "the scenario has no way out")
        await super().sock_connect(sock, address)


class Names:
    """A resolver with a script for each name: its n-th look-up finds the n-th, the last one holds."""

    def __init__(self, scripts: dict[str, Sequence[Found]] | None = None, *, delay_s: float = 0.0) -> None:
        self.scripts = scripts or {}
        self.asked: Counter[str] = Counter()
        self._delay_s = delay_s

    async def __call__(self, name: str) -> Sequence[str]:
        script = self.scripts[name]
        found = script[min(self.asked[name], len(script) - 1)]
        self.asked[name] += 1
        await asyncio.sleep(self._delay_s)
        if isinstance(found, OSError):
            raise found
        return found


@dataclass
class Stage:
    """A receiver at the public addresses, and canaries at the same port of the private ones."""

    loop: WatchedLoop
    authority: Authority
    port: int = 0
    answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    requests: list[str] = field(default_factory=list)
    canary_connections: Counter[str] = field(default_factory=Counter)
    _public: list[asyncio.Server] = field(default_factory=list)

    def url(self, label: str = "hook") -> str:
        return f"https://{label}.{DOMAIN}:{self.port}/"

    async def breaches(self) -> list[str]:
        """Each address that must not be reached and was, as the canaries or the log of dials saw it."""
        await asyncio.sleep(0.05)
        dialled = [address for address in self.loop.dials if address not in PUBLIC]
        return sorted({*self.canary_connections, *dialled})

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length"))
                await reader.readexactly(length)
                self.requests.append(head)
                writer.write(self.answer)
                await writer.drain()
                if b"Connection: close" in self.answer:
                    break
        writer.close()

    def _canary(self, address: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def reached(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.canary_connections[address] += 1
            writer.close()

        return reached

    def silence_public(self) -> None:
        """From now on nobody listens at the public addresses."""
        for server in self._public:
            server.close()

    @asynccontextmanager
    async def set_up(self) -> AsyncIterator[None]:
        tls = self.authority.server(f"*.{DOMAIN}", *PUBLIC, *CANARIES)
        async with contextlib.AsyncExitStack() as servers:
            for address in PUBLIC:
                server = await asyncio.start_server(self._receive, address, self.port, ssl=tls)
                self._public.append(server)
                self.port = server.sockets[0].getsockname()[1]
            for address in CANARIES if self.loop.isolated else ON_LOOPBACK:
                servers.callback((await asyncio.start_server(self._canary(address), address, self.port)).close)
            servers.callback(self.silence_public)
            yield
        await asyncio.sleep(0)


def on_stage(directory: Path, scenario: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    """Runs the scenario on a thread of its own, in a network of its own if possible; raises what it raises."""
    raised: list[BaseException] = []

    def play() -> None:
        with asyncio.Runner(loop_factory=WatchedLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, WatchedLoop)
            loop.isolated = _own_network()
            try:
                runner.run(_reported(Stage(loop, Authority(directory)), scenario))
            except BaseException as error:
                raised.append(error)

    thread = threading.Thread(target=play)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


async def _reported(stage: Stage, scenario: Callable[[Stage], Awaitable[None]]) -> None:
    async with stage.set_up():
        await scenario(stage)


def _own_network() -> bool:
    """Moves the calling thread into a new network namespace with all canaries; False where that is not permitted."""
    if sys.platform != "linux" or shutil.which("ip") is None or ctypes.CDLL(None).unshare(_CLONE_NEWNET) != 0:
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for address in ELSEWHERE:
        at_once = ["nodad"] if ":" in address else []  # else it cannot be bound for a moment
        subprocess.run(["ip", "address", "add", address, "dev", "lo", *at_once], check=True)
    return True


def client_tls(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.ca_path))
