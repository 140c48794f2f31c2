"""The process that keeps one embedded PostgreSQL alive, and takes it down when nobody uses it any more.

    join() ── starts ──▶ supervisor ── child ──▶ postgres ── forks ──▶ backends
       └ holds users.lock   └ holds supervisor.lock  └───── all hold server.lock ─────┘

- postgres dies: it is started again. What is left of the old one is waited for by server.lock, which its backends
  inherit; only then is a stale postmaster.pid removed (its pid may by now be another process's). One that does not
  start is given up at once, unless it was killed.
- The supervisor dies, by `kill -9` too: the kernel interrupts postgres, which shuts down; the next join() starts anew.
- The users die, by `kill -9` too: users.lock can be had, and after a short grace the server stops. The supervisor then
  keeps users.lock until it has ended, so that a process which joins at that moment waits and starts the next one.

It says one line on its standard output, `ready`, `taken` (another supervisor is at work) or `failed <sentence>`, and
outlives the process that started it. Signals of a terminal or a service manager do not stop it: its users decide.
Standard library only; run by `vaultevents.store.postgres.embedded`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from vaultevents.core.errors import DatabaseUnusable
from vaultevents.store.postgres import layout, privileges

TICK_S = 0.1
GRACE_S = 0.5
READY_WITHIN_S = 120.0  # recovery after a crash replays up to max_wal_size
STOP_WITHIN_S = 30.0
PREDECESSOR_GONE_WITHIN_S = 60.0
LOG_BYTES_MAX = 4 * 1024 * 1024
KILLS_MAX = 10  # of one start: who kills that often means it

_SETTINGS = {
    "listen_addresses": "",
    "port": str(layout.PORT),
    "unix_socket_permissions": "0700",
    "shared_buffers": "64MB",
    "max_connections": "100",
    "max_wal_size": "512MB",
    "max_parallel_workers_per_gather": "0",  # parallel plans need more /dev/shm than a container gives
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
}
_DURABLE = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
_NOT_DURABLE = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}


class Killed(DatabaseUnusable):
    """postgres was killed with -9 before it was ready: by a person, or by a kernel without memory."""


class Plan(NamedTuple):
    """What to run and where; `durable` counts only when the cluster is made."""

    directory: Path
    install: Path
    durable: bool
    identity: privileges.Identity
    socket_directory: Path


def main(arguments: list[str]) -> None:
    """`<directory> <install> durable|throwaway`, both paths absolute. Returns at once; a forked child does the work."""
    directory, install, durability = Path(arguments[0]), Path(arguments[1]), arguments[2]
    if os.fork():
        return
    os.chdir("/")
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler, since SIG_IGN would be inherited by postgres
    lock = layout.try_lock(layout.supervisor_lock(directory), fcntl.LOCK_EX)
    if lock is None:
        _say("taken")
        return
    try:
        _supervise(directory, install, durability == "durable")
    except DatabaseUnusable as problem:
        _say(f"failed {problem}")
    except OSError as problem:
        _say(f"failed {layout.unusable(directory, problem)}")


def _supervise(directory: Path, install: Path, durable: bool) -> None:
    identity = privileges.choose_identity()
    sockets = layout.socket_directory(directory, outside=identity.way == "drop")
    layout.make_private(sockets, identity.uid)
    plan = Plan(directory, privileges.reachable_install(install, identity), durable, identity, sockets)
    server = _start(plan)
    _say("ready")
    users = os.open(layout.users_lock(directory), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    used_at = time.monotonic()
    while True:
        time.sleep(TICK_S)
        _bound_log(layout.log_file(directory))
        if server.poll() is not None:
            server = _start(plan)
        if not _lock_now(users):
            used_at = time.monotonic()
        elif time.monotonic() - used_at < GRACE_S:
            fcntl.flock(users, fcntl.LOCK_UN)
        else:
            break  # and keep the lock: a process that joins now waits for our end
    _stop(server)
    with contextlib.suppress(OSError):
        sockets.rmdir()


def _start(plan: Plan) -> subprocess.Popen[bytes]:
    """A server that accepts sessions; one that is killed before that is no reason to give up."""
    for _ in range(KILLS_MAX):
        with contextlib.suppress(Killed):
            return _start_once(plan)
    return _start_once(plan)


def _start_once(plan: Plan) -> subprocess.Popen[bytes]:
    """Make the cluster if there is none, start postgres on it, and wait until it accepts sessions."""
    lock = _wait_for_predecessor(plan.directory)
    try:
        data = layout.data_directory(plan.directory)
        if not (data / "PG_VERSION").exists():
            _make_cluster(plan, data, lock)
        privileges.give(data, plan.identity)
        _clear_stale(data / "postmaster.pid", plan.socket_directory)
        log = layout.log_file(plan.directory)
        begin = log.stat().st_size if log.exists() else 0
        server = _spawn(plan, data, lock)
    finally:
        os.close(lock)  # postgres has its own copy
    _wait_until_ready(plan, server, begin)
    return server


def _wait_for_predecessor(directory: Path) -> int:
    """The descriptor of server.lock, once no process of an earlier server is left."""
    give_up_at = time.monotonic() + PREDECESSOR_GONE_WITHIN_S
    while (lock := layout.try_lock(layout.server_lock(directory), fcntl.LOCK_EX)) is None:
        if time.monotonic() > give_up_at:
            raise DatabaseUnusable(
                f"processes of an earlier database server still work in {directory}: end them and start again"
            )
        _interrupt_orphan(directory)
        time.sleep(0.01)
    return lock


def _clear_stale(pid_file: Path, sockets: Path) -> None:
    """What a killed server left. We hold server.lock, so none runs; its pid may be another process's by now, and
    postgres would take that for a server, as it would a zombie that nobody has reaped yet."""
    for path in (pid_file, sockets / layout.SOCKET_FILE, sockets / f"{layout.SOCKET_FILE}.lock"):
        path.unlink(missing_ok=True)


def _interrupt_orphan(directory: Path) -> None:
    """Stop a postgres whose supervisor died on a system without parent-death signals. Its answer proves the pid."""
    orphan = layout.read_postmaster(directory)
    if orphan is not None and orphan.ready and layout.answers(orphan.socket_directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan.pid, signal.SIGINT)


def _make_cluster(plan: Plan, data: Path, lock: int) -> None:
    """initdb and the database, in `data.new`; the rename is the moment at which the cluster exists."""
    if data.exists():
        raise DatabaseUnusable(
            f"{data} is not a whole PostgreSQL data directory: restore it from a backup, "
            "or move it away to begin with an empty database"
        )
    new = data.with_name("data.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    os.chown(new, plan.identity.uid, plan.identity.gid)
    password = os.urandom(24).hex()
    _initdb(plan, new, lock, password)
    sync = _DURABLE if plan.durable else _NOT_DURABLE
    single = ["--single", *_options(sync), "-D", privileges.path_for(plan.identity, new), "postgres"]
    _run(plan, new, lock, "postgres", single, f"CREATE DATABASE {layout.DATABASE}\n")
    if not plan.durable:
        (new / layout.THROWAWAY).touch()
    _write_durably(layout.password_file(plan.directory), password)
    new.rename(data)
    layout.sync_folder(plan.directory)


def _initdb(plan: Plan, new: Path, lock: int, password: str) -> None:
    password_file = plan.socket_directory / "password"  # the one place that both we and the server's user can reach
    _write_durably(password_file, password)
    os.chown(password_file, plan.identity.uid, plan.identity.gid)
    options = ["-D", privileges.path_for(plan.identity, new), "-U", layout.USER, "--pwfile", str(password_file)]
    options += ["-A", "scram-sha-256", "-E", "UTF8", "--locale=C", "--data-checksums", "--no-instructions"]
    options += [] if plan.durable else ["--no-sync"]
    try:
        _run(plan, new, lock, "initdb", options)
    finally:
        password_file.unlink()


def _run(plan: Plan, data: Path, lock: int, tool: str, options: list[str], text: str = "") -> None:
    """One tool of PostgreSQL to its end. --single ends with 0 whatever its statements did, hence the look for ERROR."""
    parent = os.getpid()
    done = subprocess.run(
        [str(plan.install / "bin" / tool), *options],
        input=text,
        capture_output=True,
        text=True,
        cwd=data,
        env=_environment(),
        pass_fds=[lock],
        start_new_session=True,
        preexec_fn=lambda: privileges.become(plan.identity, parent),
        check=False,
    )
    said = done.stdout + done.stderr
    if done.returncode != 0 or "ERROR:" in said:
        raise _failure(plan.directory, "an empty database could not be made", said, done.returncode)


def _spawn(plan: Plan, data: Path, lock: int) -> subprocess.Popen[bytes]:
    durability = _NOT_DURABLE if (data / layout.THROWAWAY).exists() else _DURABLE
    options = _options({**_SETTINGS, **durability, "unix_socket_directories": str(plan.socket_directory)})
    parent = os.getpid()
    with layout.open_log(plan.directory) as log:
        return subprocess.Popen(
            [str(plan.install / "bin" / "postgres"), "-D", privileges.path_for(plan.identity, data), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=data,
            env=_environment(),
            pass_fds=[lock],
            start_new_session=True,
            preexec_fn=lambda: privileges.become(plan.identity, parent),
        )


def _wait_until_ready(plan: Plan, server: subprocess.Popen[bytes], log_begin: int) -> None:
    give_up_at = time.monotonic() + READY_WITHIN_S
    while True:
        seen = layout.read_postmaster(plan.directory)
        if seen is not None and seen.pid == server.pid and seen.ready:
            return
        code = server.poll()
        if code is not None or time.monotonic() > give_up_at:
            _stop(server)
            said = _log_since(layout.log_file(plan.directory), log_begin)
            problem = "did not become ready in time" if code is None else "does not start"
            raise _failure(plan.directory, problem, said, code)
        time.sleep(0.005)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """SIGINT is postgres's fast shutdown, SIGQUIT its immediate one."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        if server.poll() is not None:
            return
        server.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_WITHIN_S)


def _failure(directory: Path, problem: str, said: str, code: int | None) -> DatabaseUnusable:
    """The sentence for what PostgreSQL said: the last line that names an error, else the last line.

    `code` is what it ended with by itself; what it says of a process of its own that was killed counts as well.
    """
    if code == -signal.SIGKILL or (code and "was terminated by signal 9" in said):
        return Killed(
            f"the embedded PostgreSQL in {directory} was killed each time it started: find out who does that (the "
            f"system does when memory runs out; more in {layout.log_file(directory)}) and start again"
        )
    if "No space left on device" in said or "Check free disk space" in said:  # the latter for a write cut short
        return layout.no_space(directory)
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it said nothing"]
    errors = [line for line in lines if any(word in line for word in ("ERROR:", "FATAL:", "PANIC:", "error:"))]
    return DatabaseUnusable(
        f"the embedded PostgreSQL in {directory}: {problem} ({(errors or lines)[-1]}); "
        f"fix that (more in {layout.log_file(directory)}) or restore a backup"
    )


def _log_since(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read(LOG_BYTES_MAX).decode(errors="replace")


def _bound_log(log: Path) -> None:
    """Copy and empty: postgres goes on appending to the same file, at its new end. A full disk costs the copy only."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_BYTES_MAX:
            with contextlib.suppress(OSError):
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def _options(settings: dict[str, str]) -> list[str]:
    return [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]


def _environment() -> dict[str, str]:
    """Return the environment of postgres: a few variables of ours, in the C locale, without PGDATA and its kin."""
    kept = {name: value for name, value in layout.server_environment().items() if not name.startswith("LC_")}
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _lock_now(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _say(line: str) -> None:
    """Write the one line for our parent, which may be gone; afterwards stdout is the log, which standard error is."""
    with contextlib.suppress(OSError):
        os.write(1, f"{' '.join(line.split())}\n".encode())
    os.dup2(2, 1)
