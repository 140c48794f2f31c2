"""`kill -9` of each process round the embedded PostgreSQL: the server comes back, or goes, and loses no commit."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from embedded_user import (
    NO_DEATH_SIGNAL,
    User,
    ask,
    is_gone,
    kill,
    postmaster,
    supervisor,
    supervisors_of,
)
from timeouts import wait_until
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable
from vaultevents.store.postgres import embedded, layout
from vaultevents.store.postgres.embedded import EmbeddedPostgres, find_install

pytestmark = pytest.mark.fault

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the parent-death signal")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "db"
    yield path
    wait_until(lambda: is_gone(path))


async def commit_and_open_another(dsn: str) -> asyncpg.Connection:
    """Row 1 is committed, row 2 written in a transaction that stays open on the returned connection."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("create table if not exists rows (id int)")
    await connection.execute("insert into rows values (1)")
    await connection.execute("begin")
    await connection.execute("insert into rows values (2)")
    return connection


def install_that_first(act: str, times: int, place: Path) -> Path:
    """PostgreSQL 18, but `postgres` does `act` instead of its work the first `times` that it is run by us."""
    real, stand_in = find_install("18"), place / "install" / "bin" / "postgres"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text(
        f"#!/bin/sh\necho >> {place}/runs\n"
        f'if [ "$(wc -l < {place}/runs)" -le {times} ]; then {act}; exit 1; fi\nexec {real}/bin/postgres "$@"\n'
    )
    stand_in.chmod(0o755)
    (stand_in.parent / "initdb").symlink_to(real / "bin" / "initdb")
    return stand_in.parents[1]


@pytest.mark.parametrize(
    "act", ["kill -9 $$", "echo 'LOG:  startup process (PID 7) was terminated by signal 9: Killed' >&2"]
)
@pytest.mark.parametrize("made", [True, False])
async def test_a_server_killed_while_it_starts_is_started_again(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, made: bool
) -> None:
    if made:
        with EmbeddedPostgres(directory):
            pass
        wait_until(lambda: is_gone(directory))
    install = install_that_first(act, 3, tmp_path)
    monkeypatch.setattr(embedded, "find_install", lambda _: install)
    with EmbeddedPostgres(directory) as address:
        assert await ask(address.dsn, "select 1") == 1


def test_a_server_that_is_killed_again_and_again_is_given_up(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedPostgres(directory):
        pass
    wait_until(lambda: is_gone(directory))
    install = install_that_first("kill -9 $$", 1000, tmp_path)
    monkeypatch.setattr(embedded, "find_install", lambda _: install)
    with pytest.raises(DatabaseUnusable, match="was killed each time it started"):
        EmbeddedPostgres(directory).join()


@linux
async def test_a_supervisor_killed_while_its_server_starts_is_no_reason_to_give_up(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = install_that_first(f"touch {tmp_path}/waits; exec sleep 60", 1, tmp_path)
    monkeypatch.setattr(embedded, "find_install", lambda _: install)
    user = EmbeddedPostgres(directory)
    joining = asyncio.create_task(asyncio.to_thread(user.join))
    while not (tmp_path / "waits").exists():
        await asyncio.sleep(0.01)
    kill(*supervisors_of(directory))
    with pytest.raises(DatabaseUnavailable, match="did not become ready"):
        await joining
    with user as address:
        assert await ask(address.dsn, "select 1") == 1


@pytest.mark.parametrize("victim", ["postmaster", "supervisor", "both"])
async def test_server_side_kill_keeps_commits_and_the_next_join_works(directory: Path, victim: str) -> None:
    with EmbeddedPostgres(directory) as address:
        user = EmbeddedPostgres(directory)
        user.join()
        connection = await commit_and_open_another(address.dsn)
        old = postmaster(directory)
        keeper = supervisor(directory)
        if victim in ("supervisor", "both"):
            keeper.kill()
        if victim in ("postmaster", "both"):
            old.kill()
        wait_until(lambda: not old.is_running() or old.status() == "zombie")

        again = await asyncio.to_thread(user.join)

        assert await ask(again.dsn, "select array_agg(id) from rows") == [1]
        assert again == address
        assert postmaster(directory).pid != old.pid
        assert (supervisor(directory).pid == keeper.pid) == (victim == "postmaster")
        connection.terminate()
        user.leave()


async def test_the_supervisor_restarts_by_itself(directory: Path) -> None:
    """Nobody calls join(): a user that only dials again finds a server."""
    with EmbeddedPostgres(directory, durable=False) as address:
        for _ in range(3):
            old = postmaster(directory)
            old.kill()

            def is_back(pid: int = old.pid) -> bool:
                found = layout.read_postmaster(directory)
                return found is not None and found.pid != pid and found.ready

            wait_until(is_back)
            assert await ask(address.dsn, "select 1") == 1


@linux
async def test_a_server_whose_supervisor_dies_stops_cleanly(directory: Path) -> None:
    with EmbeddedPostgres(directory) as address:
        await ask(address.dsn, "create table kept as select 7 as answer")
        supervisor(directory).kill()
        wait_until(lambda: is_gone(directory))
        assert not (directory / "data" / "postmaster.pid").exists()
        assert "database system is shut down" in layout.log_file(directory).read_text()


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: installs a seccomp filter")
async def test_an_orphan_of_a_system_without_death_signals_is_replaced(directory: Path) -> None:
    with User(directory, before=NO_DEATH_SIGNAL, durability="durable") as user:
        await ask(user.dsn(), "create table kept as select 7 as answer")
        orphan = postmaster(directory)
        kill(supervisor(directory))
        await asyncio.sleep(0.3)
        assert postmaster(directory) == orphan, "it runs on"
        with EmbeddedPostgres(directory) as address:
            assert postmaster(directory) != orphan
            assert await ask(address.dsn, "select answer from kept") == 7


async def test_when_the_only_user_is_killed_the_server_goes(directory: Path) -> None:
    """Killed with its whole process group, as a terminal or a job control would."""
    with User(directory, start_new_session=True) as user:
        assert await ask(user.dsn(), "select 1") == 1
        os.killpg(user.process.pid, signal.SIGKILL)
    wait_until(lambda: is_gone(directory))
    assert "database system is shut down" in layout.log_file(directory).read_text()


async def test_when_one_of_two_users_is_killed_the_server_stays(directory: Path) -> None:
    with User(directory) as victim, User(directory) as survivor:
        victim.dsn()
        dsn = survivor.dsn()
        started = await ask(dsn, "select pg_postmaster_start_time()")
        victim.kill()
        await asyncio.sleep(1)
        assert await ask(dsn, "select pg_postmaster_start_time()") == started


async def test_all_at_once(directory: Path) -> None:
    """The machine's worst moment short of losing power: users, supervisor and every server process die together."""
    with User(directory, durability="durable") as user:
        connection = await commit_and_open_another(user.dsn())
        server, keeper = postmaster(directory), supervisor(directory)
        kill(keeper, server, *server.children())
        user.kill()
        connection.terminate()
    with EmbeddedPostgres(directory) as address:
        assert await ask(address.dsn, "select array_agg(id) from rows") == [1]


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.3, 0.5, 0.7])
async def test_killed_while_the_cluster_is_made(directory: Path, after_s: float) -> None:
    """Wherever in the making user and supervisor die, the next join ends with one whole cluster."""
    with User(directory) as user:
        await asyncio.sleep(after_s)
        user.kill()
    kill(*supervisors_of(directory))
    with EmbeddedPostgres(directory, durable=False) as address:
        assert await ask(address.dsn, "select current_database()") == "vaultevents"


async def test_a_recycled_pid_in_a_stale_pid_file_does_not_stop_the_start(directory: Path) -> None:
    """As after a container's restart: the pid of the killed server is now that of an innocent process, ours."""
    with EmbeddedPostgres(directory, durable=False):
        keeper, server = supervisor(directory), postmaster(directory)
        kill(keeper, *server.children(), server)
        wait_until(lambda: is_gone(directory))
        stale = directory / "data" / "postmaster.pid"
        lines = [str(os.getpid()), *(stale.read_text().splitlines()[1:] if stale.exists() else [])]
        stale.write_text("\n".join(lines) + "\n")
        with EmbeddedPostgres(directory, durable=False) as address:
            assert await ask(address.dsn, "select 1") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_polite_signals_do_not_take_the_server_from_its_users(directory: Path, number: signal.Signals) -> None:
    """A service manager signals every process of a service at once; the users still have to drain."""
    with EmbeddedPostgres(directory, durable=False) as address:
        started = await ask(address.dsn, "select pg_postmaster_start_time()")
        supervisor(directory).send_signal(number)
        await asyncio.sleep(0.3)
        assert await ask(address.dsn, "select pg_postmaster_start_time()") == started
