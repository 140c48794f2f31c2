"""The command line as a user runs it: separate processes with a clean environment, a chain and receivers beside them.

Commands are forks of a process that has imported them (`fork_server`), unless the command line is `fresh`.

Nodes and receivers run in the test's event loop, so every wait here is an `await`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import asyncpg

import fork_server
from fork_server import ForkedProcess
from simulation_fixtures import register
from timeouts import WAIT_TIMEOUT_S
from vaultevents import config
from vaultevents.core.sealing import NONCE_BYTES, Secret
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.core.webhooks import Webhook
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.receivers import Hook, Receivers
from vaultevents.devnet.simulation import Simulation
from vaultevents.store import webhooks
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.wiring.database import open_store

PROGRAM = ("-m", "vaultevents")


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The object on the last line of stdout."""
        return json.loads(self.stdout.splitlines()[-1])

    @property
    def logs(self) -> list[dict[str, Any]]:
        """The lines of stderr that are log lines."""
        return [json.loads(line) for line in self.stderr.splitlines() if line.startswith("{")]

    @property
    def words(self) -> list[str]:
        """The lines of stderr that are not."""
        return [line for line in self.stderr.splitlines() if not line.startswith("{")]

    @property
    def error(self) -> str:
        """The one sentence of a command that could not do its work; fails for anything else on stderr."""
        assert self.code == 1, self
        assert "Traceback" not in self.stdout + self.stderr, self.stderr
        (line,) = self.words
        assert line.startswith("error: "), line
        return line.removeprefix("error: ")

    def ok(self) -> Self:
        assert self.code == 0, self
        assert self.words == [], self.stderr
        return self


class Running:
    """A command that has not ended; its output is collected, so that it never waits for a reader."""

    def __init__(self, process: asyncio.subprocess.Process | ForkedProcess) -> None:
        self.process = process
        self._stdout, self._stderr = bytearray(), bytearray()
        self._arrival = asyncio.Event()
        assert process.stdout is not None and process.stderr is not None
        self._readers = asyncio.gather(
            self._collect(process.stdout, self._stdout), self._collect(process.stderr, self._stderr)
        )
        self._readers.add_done_callback(lambda _: self._arrival.set())

    async def _collect(self, stream: asyncio.StreamReader, into: bytearray) -> None:
        while part := await stream.read(65536):
            into += part
            self._arrival.set()

    @property
    def pid(self) -> int:
        return self.process.pid

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def stdout_so_far(self) -> str:
        return self._stdout.decode(errors="replace")

    @property
    def stderr_so_far(self) -> str:
        return self._stderr.decode(errors="replace")

    async def said(self, text: str, times: int = 1) -> None:
        """Wait until stderr has the text so often; fails, with stderr, when the command ends before or is late."""
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                while self.stderr_so_far.count(text) < times:
                    assert not self._readers.done(), f"ended without '{text}': {self.stderr_so_far}"
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError:
            raise AssertionError(f"runs without '{text}': {self.stderr_so_far}") from None

    async def end(self, number: signal.Signals | None = signal.SIGTERM) -> Ended:
        if number is not None and self.process.returncode is None:
            self.send_signal(number)
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                await self._readers
                code = await self.process.wait()
        finally:
            if self.process.returncode is None:
                self.process.kill()
        return Ended(code, self._stdout.decode(), self._stderr.decode())


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A user with a home directory and a working directory, and nothing else in the environment."""

    home: Path
    environment: dict[str, str]
    program: Sequence[str] = PROGRAM
    fresh: bool = False
    started: list[Running] = field(default_factory=list)

    @classmethod
    def of(cls, home: Path, **environment: str) -> CommandLine:
        own = {"PATH": os.environ["PATH"], "HOME": str(home), "TZ": "UTC", "VAULTEVENTS_CONSOLE__PORT": "0"}
        return cls(home, own | environment)

    async def start(self, *arguments: str, **environment: str) -> Running:
        variables = self.environment | environment
        process: asyncio.subprocess.Process | ForkedProcess
        if self.fresh:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self.program,
                *arguments,
                cwd=self.home,
                env=variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=2**20,
            )
        else:
            process = await fork_server.start(self.program, arguments, variables, self.home)
        running = Running(process)
        self.started.append(running)
        return running

    async def run(self, *arguments: str, **environment: str) -> Ended:
        return await (await self.start(*arguments, **environment)).end(None)

    def freshly(self) -> CommandLine:
        """The same user, whose commands start a new interpreter: for tests whose subject is the start."""
        return replace(self, fresh=True)

    async def kill_all(self) -> None:
        """What a failed test has left running."""
        for running in self.started:
            if running.process.returncode is None:
                await running.end(signal.SIGKILL)


class Place:
    """One operator's corner: `vaultevents.toml` in a home of its own, a node, receivers, a schema of its own."""

    def __init__(
        self, home: Path, data_dir: Path, simulation: Simulation, node: ExecutionServer, receivers: Receivers
    ) -> None:
        self.home = home
        self.data_dir = data_dir
        self.simulation = simulation
        self.node = node
        self.receivers = receivers
        self.schema = f"t_{uuid4().hex}"
        self.shell = CommandLine.of(home)
        self.url = ""

    def configure(
        self,
        top: str = "",
        execution: str = "",
        delivery: str = "",
        api: str = "port = 0",
        log: str = "",
        retention: str = "",
        metrics: str = 'serve = "off"',
    ) -> None:
        """Writes the configuration; more lines may be given for each table."""
        self.config.write_text(
            f'network = "devnet"\nchain_id = {self.simulation.chain.chain_id}\ndata_dir = "{self.data_dir}"\n'
            f'database_schema = "{self.schema}"\n{top}\n'
            f'[execution]\nurls = ["{self.url}"]\npoll_interval_s = 0.05\n{execution}\n'
            f'[delivery]\nallow = ["127.0.0.0/8:*"]\nca_file = "{self.receivers.ca_path}"\n'
            f'schedule = "1s, 1s, 1s"\npoll_interval_s = 0.2\n{delivery}\n[api]\n{api}\n[log]\n{log}\n'
            f"[retention]\n{retention}\n[metrics]\n{metrics}\n"
        )

    @property
    def config(self) -> Path:
        return self.home / "vaultevents.toml"

    async def run(self, *arguments: str, **environment: str) -> Ended:
        return await self.shell.run(*arguments, **environment)

    async def subscribed(self) -> dict[str, Hook]:
        """The simulation's accounts and vaults registered, with a receiver and its webhook for each account."""
        async with open_store(config.load(self.config)) as store:
            await register(store.database, self.simulation)
            hooks = {}
            for account_id in sorted({registration.account_id for registration in self.simulation.registrations}):
                hook, secret = self.receivers.hook(account_id), Secret(new_secret(secrets.token_bytes(SECRET_BYTES)))
                hook.secret = secret.reveal()
                webhook = Webhook(f"wh-{account_id}-{self.schema}", account_id, hook.url, None, None, active=True)
                nonce = secrets.token_bytes(NONCE_BYTES)
                await webhooks.create_webhook(store.database, webhook, secret, store.key, nonce)
                hooks[account_id] = hook
            return hooks

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.run("status", "--json")).ok().json
        return found


class Door:
    """A port of loopback that leads to another one, and can be shut and opened again: a node that goes and returns."""

    def __init__(self, url: str) -> None:
        self._behind = int(url.rsplit(":", 1)[1])
        self._port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def open(self) -> str:
        """Listens, from the second time on at the same port; returns the URL."""
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{self._port}"

    async def shut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._behind)
        self._open |= {writer, back}
        try:
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        finally:
            self._open -= {writer, back}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def place(home: Path, data_dir: Path, simulation: Simulation) -> AsyncIterator[Place]:
    """A configured place over a running node and running receivers."""
    receivers, node = Receivers(home), ExecutionServer(simulation.chain)
    await receivers.start()
    found = Place(home, data_dir, simulation, node, receivers)
    try:
        found.url = await node.start()
        found.configure()
        yield found
    finally:
        await found.shell.kill_all()
        await node.stop()
        await receivers.stop()


@asynccontextmanager
async def asking(address: ServerAddress, schema: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to what the commands have stored."""
    connection = await asyncpg.connect(**address.connect_kwargs(), server_settings={"search_path": schema})
    try:
        yield connection
    finally:
        await connection.close()


def delivered(hook: Hook) -> Counter[str]:
    """How often each event was accepted with a good signature."""
    return Counter(request.webhook_id for request in hook.accepted if request.verified)


def wanted(simulation: Simulation, account_id: str) -> set[str]:
    """The ids of the account's events in final blocks."""
    return {event_id for owner, event_id in simulation.expected() if owner == account_id}
