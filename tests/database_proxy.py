"""A TCP address for the Unix socket of a PostgreSQL server, whose network can fail."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, Literal, Self

from vaultevents.store.postgres.embedded import ServerAddress

Network = Literal["up", "silent", "refusing"]


class DatabaseProxy:
    """Forwards connections to `server`, which may be exchanged.

    `silence` makes the present connections black holes: they stay open, and nothing passes any longer in either
    direction. `cut` ends them. `network` is what new connections meet.
    """

    def __init__(self, server: ServerAddress) -> None:
        self.server = server
        self.network: Network = "up"
        self._listener: asyncio.Server | None = None
        self._silent = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port: int = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def connect_kwargs(self) -> dict[str, Any]:
        return {**self.server.connect_kwargs(), "host": "127.0.0.1", "port": self.port, "ssl": False}

    def dsn(self, database: str) -> str:
        login = f"{self.server.user}:{self.server.password}"
        return f"postgresql://{login}@127.0.0.1:{self.port}/{database}?sslmode=disable"

    def silence(self) -> None:
        """Let nothing more pass on the present connections, for good; later ones work."""
        self._silent.set()
        self._silent = asyncio.Event()

    def cut(self) -> None:
        """End the present connections, on both sides."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            if self.network == "refusing":
                return
            if self.network == "silent":
                await asyncio.Event().wait()
            path = Path(self.server.host) / f".s.PGSQL.{self.server.port}"
            far_reader, far = await asyncio.open_unix_connection(str(path))
            self._writers.add(far)
            silent = self._silent
            await asyncio.gather(_forward(reader, far, silent), _forward(far_reader, writer, silent))
        except (OSError, asyncio.CancelledError):
            pass  # the server is away, one side has ended, or the proxy ends
        finally:
            for end in (writer, far):
                if end is not None:
                    self._writers.discard(end)
                    end.transport.abort()
            self._tasks.discard(task)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silent: asyncio.Event) -> None:
    while data := await reader.read(65536):
        if silent.is_set():
            await asyncio.Event().wait()
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
