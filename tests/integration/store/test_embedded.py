"""The embedded PostgreSQL with real servers: made, joined, left, refused, and run as every kind of user."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import asyncpg
import pytest

from embedded_user import NO_NAMESPACES, User, ask, is_gone, mode, postmaster, supervisor
from timeouts import wait_until
from vaultevents.core.errors import DatabaseUnusable
from vaultevents.store.postgres import embedded, layout, privileges
from vaultevents.store.postgres import supervisor as supervisor_module
from vaultevents.store.postgres.embedded import EmbeddedPostgres, ServerAddress, find_install

pytestmark = pytest.mark.integration

as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root: shows how postgres, which refuses root, is run by it"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: seccomp, namespaces")
NOBODY = pwd.getpwnam("nobody")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A data directory, not yet made; every test must leave it without a server."""
    path = tmp_path / "db"
    yield path
    if path.exists():
        wait_until(lambda: is_gone(path))


@pytest.mark.parametrize("major", ["18", "16"])
async def test_fresh_directory_becomes_a_server_that_answers(directory: Path, major: Literal["18", "16"]) -> None:
    with EmbeddedPostgres(directory, major=major) as address:
        connection = await asyncpg.connect(**address.connect_kwargs())
        settings = await connection.fetchrow(
            """select current_setting('server_version_num')::int / 10000 as major, current_database() as database,
                      current_user as role, current_setting('server_encoding') as encoding,
                      (select datcollate from pg_database where datname = current_database()) as collation,
                      current_setting('fsync') as fsync, current_setting('synchronous_commit') as synchronous_commit,
                      current_setting('data_checksums') as checksums, current_setting('listen_addresses') as tcp"""
        )
        await connection.close()
    assert dict(settings) == {
        "major": int(major),
        "database": "vaultevents",
        "role": "vaultevents",
        "encoding": "UTF8",
        "collation": "C",
        "fsync": "on",
        "synchronous_commit": "on",
        "checksums": "on",
        "tcp": "",
    }


async def test_only_we_can_reach_it_and_only_with_the_password(directory: Path) -> None:
    with EmbeddedPostgres(directory, durable=False) as address:
        assert mode(directory) == 0o700
        assert mode(Path(address.host)) == 0o700
        assert mode(layout.password_file(directory)) == 0o600
        assert not postmaster(directory).net_connections("inet")
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(**{**address.connect_kwargs(), "password": "guessed"})
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(**{**address.connect_kwargs(), "password": ""})
        assert address.password not in repr(address)
        assert await ask(address.dsn, "select 1") == 1


async def test_two_processes_that_come_at_once_share_one_server(directory: Path) -> None:
    with User(directory) as one, User(directory) as other:
        dsns = {one.dsn(), other.dsn()}
        assert len(dsns) == 1
        dsn = dsns.pop()
        started = await ask(dsn, "select pg_postmaster_start_time()")

        one.leave()
        await asyncio.sleep(supervisor_module.GRACE_S + 2 * supervisor_module.TICK_S)
        assert await ask(dsn, "select pg_postmaster_start_time()") == started, "the other still uses it"

        other.leave()
        wait_until(lambda: is_gone(directory))
    assert not layout.socket_directory(directory).is_dir()


async def test_eight_first_joins_in_one_process_make_one_cluster(directory: Path) -> None:
    users = [EmbeddedPostgres(directory, durable=False) for _ in range(8)]
    addresses = await asyncio.gather(*(asyncio.to_thread(user.join) for user in users))
    assert len(set(addresses)) == 1
    assert await ask(addresses[0].dsn, "select count(*) from pg_database where datname = 'vaultevents'") == 1
    for user in users:
        user.leave()


async def test_who_joins_while_the_last_user_leaves_gets_a_server_that_stays(directory: Path) -> None:
    """The claim of each round comes at another moment of the supervisor's going: before, within and after it."""
    going = supervisor_module.GRACE_S
    for pause_s in (0.0, going, going + 0.1, going + 0.15, going + 0.2, going + 0.25, going + 0.4):
        with EmbeddedPostgres(directory, durable=False) as address:
            assert await ask(address.dsn, "select 1") == 1
        await asyncio.sleep(pause_s)
    with EmbeddedPostgres(directory, durable=False) as address:
        await asyncio.sleep(2 * going)
        assert await ask(address.dsn, "select 1") == 1


async def test_a_supervisor_that_has_begun_to_leave_lets_nobody_claim_its_server(directory: Path) -> None:
    """Its server is held still in the middle of the stop, so that the moment lasts."""
    with EmbeddedPostgres(directory, durable=False):
        old = postmaster(directory)
        old.suspend()
    try:
        wait_until(lambda: layout.is_held(layout.users_lock(directory)))
        late = EmbeddedPostgres(directory, durable=False)
        joining = asyncio.create_task(asyncio.to_thread(late.join))
        await asyncio.sleep(0.3)
        assert not joining.done()
        assert layout.is_held(layout.users_lock(directory)), "the one who comes late waits for the end"
    finally:
        old.resume()
    address = await joining
    assert await ask(address.dsn, "select 1") == 1
    assert postmaster(directory) != old
    late.leave()


async def test_data_of_the_last_time_is_there_and_joining_again_is_cheap(directory: Path) -> None:
    with EmbeddedPostgres(directory) as address:
        await ask(address.dsn, "create table kept as select 7 as answer")
    wait_until(lambda: is_gone(directory))

    with EmbeddedPostgres(directory) as address:
        assert await ask(address.dsn, "select answer from kept") == 7
        server = postmaster(directory)
        with EmbeddedPostgres(directory) as same:
            assert same == address
            assert postmaster(directory) == server, "nothing is started"


async def test_a_path_too_long_for_a_socket_works(tmp_path: Path) -> None:
    directory = tmp_path / ("deep" * 20) / ("er" * 30) / "db"
    with EmbeddedPostgres(directory, durable=False) as address:
        socket = Path(address.host)
        assert len(str(socket / layout.SOCKET_FILE)) <= 103
        assert mode(socket) == 0o700
        assert await ask(address.dsn, "select 1") == 1
    wait_until(lambda: is_gone(directory))
    assert not layout.socket_directory(directory).is_dir()


def test_a_socket_directory_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for planted in (open_to_all, link):
        with pytest.raises(DatabaseUnusable, match="not a private directory"):
            layout.make_private(planted, os.geteuid())
    layout.make_private(tmp_path / "new", os.geteuid())
    assert mode(tmp_path / "new") == 0o700


def test_a_cluster_of_another_major_version_is_refused(directory: Path) -> None:
    with EmbeddedPostgres(directory, major="16", durable=False):
        with pytest.raises(DatabaseUnusable, match="made by PostgreSQL 16 and this is 18"):
            EmbeddedPostgres(directory, major="18", durable=False).join()
        with EmbeddedPostgres(directory, major="16", durable=False) as address:
            assert address.host == str(layout.socket_directory(directory))


async def test_durability_is_decided_once(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "real"):
        pass
    wait_until(lambda: is_gone(tmp_path / "real"))
    with EmbeddedPostgres(tmp_path / "real", durable=False) as address:
        assert await ask(address.dsn, "show fsync") == "on", "real data never runs without fsync"

    with EmbeddedPostgres(tmp_path / "toy", durable=False) as address:
        assert await ask(address.dsn, "show fsync") == "off"
        with pytest.raises(DatabaseUnusable, match="throw-away"):
            EmbeddedPostgres(tmp_path / "toy").join()


def test_without_the_wheel_the_sentence_names_the_way_out(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DatabaseUnusable, match="set database_url"):
        EmbeddedPostgres(directory).join()


def test_a_half_copied_data_directory_is_refused_and_left_alone(directory: Path) -> None:
    (directory / "data" / "base").mkdir(parents=True)
    with pytest.raises(DatabaseUnusable, match="not a whole PostgreSQL data directory"):
        EmbeddedPostgres(directory).join()
    assert [path.name for path in (directory / "data").iterdir()] == ["base"]


def test_a_broken_cluster_is_refused_with_what_postgres_says(directory: Path) -> None:
    with EmbeddedPostgres(directory, durable=False):
        pass
    wait_until(lambda: is_gone(directory))
    (directory / "data" / "global" / "pg_control").write_bytes(b"\0" * 8192)
    with pytest.raises(DatabaseUnusable, match=r"does not start \(.*incompatible with server"):
        EmbeddedPostgres(directory, durable=False).join()


def test_a_lost_password_file_is_named(directory: Path) -> None:
    with EmbeddedPostgres(directory, durable=False):
        layout.password_file(directory).unlink()
        with pytest.raises(DatabaseUnusable, match="password is missing: restore it"):
            EmbeddedPostgres(directory, durable=False).join()


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DatabaseUnusable, match="cannot be used"):
        EmbeddedPostgres(tmp_path / "file").join()


async def test_a_creation_that_was_killed_half_way_is_done_again(directory: Path) -> None:
    (directory / "data.new" / "base").mkdir(parents=True)
    (directory / "password").write_text("of the one that never was")
    with EmbeddedPostgres(directory, durable=False) as address:
        assert await ask(address.dsn, "select 1") == 1
    assert not (directory / "data.new").exists()


async def test_the_log_is_bounded(directory: Path) -> None:
    log = layout.log_file(directory)
    with EmbeddedPostgres(directory, durable=False) as address:
        with log.open("ab") as file:
            file.write(b"x" * (supervisor_module.LOG_BYTES_MAX + 1))
        wait_until(lambda: log.stat().st_size < supervisor_module.LOG_BYTES_MAX)
        with pytest.raises(asyncpg.UndefinedTableError):
            await ask(address.dsn, "select * from said_after_the_cut")
        assert "said_after_the_cut" in log.read_text()
        assert log.with_name("server.log.1").stat().st_size > supervisor_module.LOG_BYTES_MAX


async def test_a_foreign_environment_does_not_leak_in(directory: Path) -> None:
    environment = {
        **os.environ,
        "PGDATA": "/nowhere",
        "PGPORT": "1",
        "PGOPTIONS": "-c x=1",
        "LC_ALL": "xx",
        "TZ": "Asia/Tokyo",
    }
    with User(directory, env=environment) as user:
        assert await ask(user.dsn(), "show timezone") == "UTC"


async def test_the_supervisor_and_the_server_have_no_secret_in_their_environment(directory: Path) -> None:
    secrets = {"VAULTEVENTS_MASTER_KEY": "11" * 32, "VAULTEVENTS_OPERATOR_SECRET": "whsec_x", "AWS_SECRET": "y"}
    with User(directory, env={**os.environ, **secrets}) as user:
        assert await ask(user.dsn(), "select 1") == 1
        ours = {*user_environment(user.process.pid)}
        seen = [user_environment(process.pid) for process in (supervisor(directory), postmaster(directory))]
    assert secrets.keys() <= ours, "what is looked for can be found"
    for names in seen:
        assert "PATH" in names
        others = {name for name in names if not name.startswith(("LC_", "PG"))} - ALLOWED
        assert not others


ALLOWED = {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"}


def user_environment(pid: int) -> set[str]:
    """The names in the environment of a process, as any process of the same user can read them."""
    parts = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {part.split(b"=", 1)[0].decode() for part in parts if part}


async def test_a_module_of_the_working_directory_does_not_leak_in(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "subprocess.py").write_text("raise SystemExit('planted')")
    with EmbeddedPostgres(directory, durable=False) as address:
        assert await ask(address.dsn, "select 1") == 1


def test_address_quotes_what_a_url_cannot_hold() -> None:
    address = ServerAddress("/a b/c", 5432, "us:er", "p@ss/w", "d?b")
    assert address.dsn == "postgresql://us%3Aer:p%40ss%2Fw@/d%3Fb?host=%2Fa%20b%2Fc&port=5432"


# --- as whom postgres runs ---


def namespace_of(pid: int) -> Path:
    return Path(f"/proc/{pid}/ns/user").readlink()


@as_root
@linux
async def test_root_runs_it_in_a_user_namespace(directory: Path) -> None:
    with EmbeddedPostgres(directory, durable=False) as address:
        server = postmaster(directory)
        assert namespace_of(server.pid) != namespace_of(os.getpid())
        assert (directory / "data").stat().st_uid == 0
        assert await ask(address.dsn, "select 1") == 1


@as_root
@linux
async def test_root_without_user_namespaces_runs_it_as_nobody_below_a_closed_directory(directory: Path) -> None:
    assert mode(directory.parent) == 0o700
    with User(directory, before=NO_NAMESPACES, durability="durable") as user:
        dsn = user.dsn()
        assert postmaster(directory).uids().real == NOBODY.pw_uid
        assert postmaster(directory).gids().real == NOBODY.pw_gid
        assert postmaster(directory).cwd() == str(directory / "data")
        await ask(dsn, "create table kept as select 7 as answer")
        user.leave()
    assert mode(directory.parent) == 0o700, "no directory was opened to others"
    wait_until(lambda: is_gone(directory))

    with EmbeddedPostgres(directory) as address:  # in a namespace again: the files come back to root
        assert postmaster(directory).uids().real == 0
        assert await ask(address.dsn, "select answer from kept") == 7
    wait_until(lambda: is_gone(directory))

    with User(directory, before=NO_NAMESPACES, durability="durable") as user:
        assert await ask(user.dsn(), "select answer from kept") == 7


@as_root
@linux
async def test_binaries_that_nobody_cannot_reach_are_copied(directory: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    package = find_install("18").parent
    for part in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(part, closed / part.name, symlinks=True, ignore=shutil.ignore_patterns("pginstall", "include"))
    copies_before = set(privileges.COPIES.glob("*"))
    before = f"{NO_NAMESPACES}\nimport sys; sys.path.insert(0, {str(closed)!r})\n"
    try:
        with User(directory, before=before) as user:
            assert await ask(user.dsn(), "select 1") == 1
            program = Path(postmaster(directory).exe())
            assert program.is_relative_to(privileges.COPIES)
            user.leave()
        wait_until(lambda: is_gone(directory))
        with User(directory, before=before) as user:
            assert await ask(user.dsn(), "select 1") == 1
            assert Path(postmaster(directory).exe()) == program, "copied once"
            user.leave()
        wait_until(lambda: is_gone(directory))
    finally:
        for copy in set(privileges.COPIES.glob("*")) - copies_before:
            shutil.rmtree(copy)
        if not copies_before and privileges.COPIES.exists():
            privileges.COPIES.rmdir()


@pytest.fixture
def as_nobody() -> dict[str, Any]:
    """Options for a User that runs as nobody, with an interpreter nobody can reach."""
    where = [str(Path(embedded.__file__).parents[2]), str(find_install("18").parents[1])]
    options: dict[str, Any] = {"user": NOBODY.pw_uid, "group": NOBODY.pw_gid, "extra_groups": [], "cwd": "/"}
    environment = {"PYTHONPATH": os.pathsep.join(where), "PYTHONDONTWRITEBYTECODE": "1"}
    for python in (sys.executable, "/usr/bin/python3"):
        check = [python, "-c", "import sys, vaultevents.store.postgres.embedded; sys.exit(sys.version_info < (3, 11))"]
        try:
            subprocess.run(check, check=True, env=environment, capture_output=True, **options)
        except (OSError, subprocess.CalledProcessError):
            continue
        return {**options, "env": environment, "python": python}
    pytest.skip("nobody can run no Python 3.11 here, or cannot read this checkout")


@as_root
async def test_an_ordinary_user_runs_it_directly(as_nobody: dict[str, Any]) -> None:
    home = Path(tempfile.mkdtemp(dir="/var/tmp"))
    directory = home / "db"
    os.chown(home, NOBODY.pw_uid, NOBODY.pw_gid)
    try:
        with User(directory, **as_nobody) as user:
            assert await ask(user.dsn(), "select 1") == 1
            assert postmaster(directory).uids().real == supervisor(directory).uids().real == NOBODY.pw_uid
            user.leave()
        wait_until(lambda: is_gone(directory))
    finally:
        shutil.rmtree(home)


@as_root
def test_a_directory_that_may_not_be_written_is_named(as_nobody: dict[str, Any], tmp_path: Path) -> None:
    home = Path(tempfile.mkdtemp(dir="/var/tmp"))
    home.chmod(0o755)
    try:
        with User(home / "db", **as_nobody) as user:
            assert user.dsn().startswith(f"refused: cannot write in the database directory {home / 'db'}")
    finally:
        home.rmdir()


@as_root
@linux
@pytest.mark.parametrize("size_mb", [1, 20])
def test_a_full_disk_is_named(tmp_path: Path, size_mb: int) -> None:
    """A small file system of its own, which vanishes with the namespace that the user process lives in."""
    small = tmp_path / "small"
    small.mkdir()
    mount = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x00020000) == 0
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # private from here on
assert libc.mount(b"none", {os.fsencode(small)!r}, b"tmpfs", 0, b"size={size_mb}m") == 0, ctypes.get_errno()
"""
    with User(small / "db", before=mount) as user:
        assert (
            user.dsn() == f"refused: no disk space left for the database in {small / 'db'}: free some and start again"
        )


def test_join_and_leave_from_many_threads_of_one_object(directory: Path) -> None:
    server = EmbeddedPostgres(directory, durable=False)
    problems: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(5):
                server.join()
                server.leave()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    with server:
        assert supervisor(directory).ppid() != os.getpid(), "so that no zombie is left to us"
        assert os.getsid(supervisor(directory).pid) != os.getsid(0), "so that the terminal's signals do not reach it"
