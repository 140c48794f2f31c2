"""rotate-master-key and webhook rotate-secret as an operator uses them: killed at any point, beside a daemon."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from command_line import Ended, Place, asking, delivered, place, wanted
from timeouts import WAIT_TIMEOUT_S, until
from vaultevents import config
from vaultevents.core.sealing import NONCE_BYTES, MasterKey, Secret, open_sealed, parse_master_key, seal
from vaultevents.devnet.receivers import Hook
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import EmbeddedPostgres, ServerAddress
from vaultevents.wiring.database import open_store

pytestmark = pytest.mark.e2e

MANY = 1000
OLD, NEW = "11" * 32, "22" * 32


class Desk:
    """A place with a database of its own, one account with a webhook, and a look into what is stored."""

    def __init__(self, here: Place, server: ServerAddress, account_id: str, hook: Hook) -> None:
        self.here = here
        self.account_id = account_id
        self.hook = hook
        self._server = server

    @property
    def key_file(self) -> Path:
        return self.here.data_dir / "master.key"

    @property
    def former_file(self) -> Path:
        return self.here.data_dir / "master.key.old"

    def key(self) -> MasterKey:
        return parse_master_key(self.key_file.read_text())

    async def many_secrets(self) -> None:
        """Former secrets of one webhook, each of which says its number; they are not valid any longer."""
        async with open_store(config.load(self.here.config)) as store, store.database.transaction() as connection:
            (webhook_id,) = await connection.fetchrow("select id from webhooks limit 1")
            rows = []
            for number in range(MANY):
                sealed = seal(store.key, Secret(str(number)), webhook_id, secrets.token_bytes(NONCE_BYTES))
                rows.append((webhook_id, store.key.id, sealed, number))
            await connection.executemany(
                "insert into webhook_secrets (webhook_id, key_id, sealed, created_at, valid_until)"
                " values ($1, $2, $3, to_timestamp($4), to_timestamp($4))",
                rows,
            )

    async def opened(self, key: MasterKey, webhook_id: str = "%") -> list[str]:
        """Every secret, or those of one webhook, the oldest first, as this key opens it."""
        query = "select webhook_id, sealed from webhook_secrets where webhook_id like $1 order by created_at"
        async with asking(self._server, self.here.schema) as connection:
            found = await connection.fetch(query, webhook_id)
        return [open_sealed(key, row["sealed"], row["webhook_id"]).reveal() for row in found]

    async def sealed_with(self, key_id: str) -> int:
        async with asking(self._server, self.here.schema) as connection:
            found: int = await connection.fetchval("select count(*) from webhook_secrets where key_id = $1", key_id)
        return found

    async def dump(self) -> str:
        """Every row of every table."""
        async with asking(self._server, self.here.schema) as connection:
            tables = await connection.fetch("select tablename from pg_tables where schemaname = current_schema")
            found = [await connection.fetch(f"select t::text from {name} t") for (name,) in tables]
        return "\n".join(row[0] for rows in found for row in rows)

    async def traffic(self) -> None:
        """Some events more, until a running daemon has delivered all there are."""
        before = len(delivered(self.hook))
        for _ in range(20):
            self.here.simulation.step()
        await until(lambda: set(delivered(self.hook)) >= wanted(self.here.simulation, self.account_id))
        assert len(delivered(self.hook)) > before

    async def rotate(self, *options: str, **environment: str) -> Ended:
        return await self.here.run("rotate-master-key", *options, **environment)

    async def kill_once(self, reached: Callable[[], Awaitable[bool]]) -> None:
        """Starts a rotation and kills it with -9 as soon as it has come so far."""
        rotating = await self.here.shell.start("rotate-master-key")
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while not await reached():
                assert rotating.process.returncode is None, rotating.stderr_so_far
        assert (await rotating.end(signal.SIGKILL)).code == -signal.SIGKILL

    @asynccontextmanager
    async def unfinished(self) -> AsyncIterator[None]:
        """While a row is held here, no rotation comes to its end."""
        async with asking(self._server, self.here.schema) as connection, connection.transaction():
            await connection.execute("select from webhook_secrets order by created_at desc limit 1 for update")
            yield


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    data_dir = tmp_path / "data"
    with EmbeddedPostgres(data_dir / "postgres") as server:
        simulation = Simulation(31, events_per_block=2)
        simulation.history(20, 30)
        async with place(tmp_path, data_dir, simulation) as here:
            hooks = await here.subscribed()
            account_id = sorted(hooks)[0]
            yield Desk(here, server, account_id, hooks[account_id])


async def test_kill_9_at_any_point_is_taken_up_until_all_is_sealed_anew(desk: Desk) -> None:
    await desk.many_secrets()
    old = desk.key()
    before = await desk.opened(old)
    assert len(before) > MANY

    async def key_is_renewed() -> bool:
        return desk.former_file.exists() and desk.key().id != old.id

    async def some_are_done() -> bool:
        return await desk.sealed_with(old.id) < len(before)

    async def half_is_done() -> bool:
        return await desk.sealed_with(old.id) <= len(before) // 2

    async def all_but_one_are_done() -> bool:
        return await desk.sealed_with(old.id) == 1

    os.link(desk.key_file, desk.former_file)  # what a kill leaves between keeping the former key and making another
    (await desk.here.run("webhook", "list", desk.account_id)).ok()
    async with desk.unfinished():
        for reached in (key_is_renewed, some_are_done, half_is_done, all_but_one_are_done):
            await desk.kill_once(reached)
            assert parse_master_key(desk.former_file.read_text()).id == old.id
            both = parse_master_key(desk.key_file.read_text(), old)
            assert await desk.opened(both) == before, "both keys together open all at every moment"
            (await desk.here.run("webhook", "list", desk.account_id)).ok()
    new = desk.key()
    assert new.id != old.id

    done = (await desk.rotate("--json")).ok().json
    kept = desk.here.data_dir / f"master.key.{old.id}"
    assert done["keyId"] == new.id
    assert done["resealed"] == 1
    assert done["formerKeyFile"] == str(kept)
    assert await desk.opened(new) == before
    assert old.id not in await desk.dump()
    assert parse_master_key(kept.read_text()).id == old.id
    assert {stat.S_IMODE(file.stat().st_mode) for file in (kept, desk.key_file)} == {0o600}
    assert not desk.former_file.exists()


async def test_what_was_sealed_behind_a_rotation_is_sealed_anew_by_another(desk: Desk) -> None:
    """By a process that had lost its connection, and did not know."""
    old = desk.key_file.read_text()
    (await desk.rotate()).ok()
    behind = {"VAULTEVENTS_MASTER_KEY": old, "VAULTEVENTS_MASTER_KEY_PREVIOUS": desk.key_file.read_text()}
    (webhook_id,) = [
        webhook["id"]
        for webhook in (await desk.here.run("webhook", "list", desk.account_id, "--json")).ok().json["webhooks"]
    ]
    (await desk.here.run("webhook", "rotate-secret", desk.account_id, webhook_id, **behind)).ok()
    assert "give the right one" in (await desk.here.run("run")).error
    done = (await desk.rotate("--json", VAULTEVENTS_MASTER_KEY_PREVIOUS=old)).ok().json
    assert (done["resealed"], done["formerKeyFile"]) == (1, None)
    (await desk.here.run("webhook", "list", desk.account_id)).ok()


async def test_a_running_daemon_is_not_rotated_under(desk: Desk) -> None:
    """It goes on, and its deliveries verify before and after."""
    before = desk.key()
    daemon = await desk.here.shell.start("run")
    await daemon.said('"started"')
    refused = (await desk.rotate()).error
    assert refused == (
        f"a process works on this database that seals with the master key {before.id}: stop it, or restart it with the "
        "new one as its master key and this one as master_key_previous_file"
    )
    assert desk.key().id == before.id
    await desk.traffic()
    (await daemon.end()).ok()

    assert before.id in await desk.dump()
    (await desk.rotate()).ok()
    assert before.id not in await desk.dump()
    async with running(desk.here):
        await desk.traffic()
    assert desk.hook.bad_signatures == 0


@asynccontextmanager
async def running(here: Place, **environment: str) -> AsyncIterator[None]:
    daemon = await here.shell.start("run", **environment)
    await daemon.said('"started"')
    yield
    (await daemon.end()).ok()


async def test_a_daemon_with_both_keys_runs_while_all_is_sealed_anew(desk: Desk) -> None:
    first = desk.key()
    both = {"VAULTEVENTS_MASTER_KEY": NEW, "VAULTEVENTS_MASTER_KEY_PREVIOUS": desk.key_file.read_text()}
    async with running(desk.here, **both):
        await desk.traffic()
        (await desk.rotate(**both)).ok()
        await desk.traffic()
    assert desk.hook.bad_signatures == 0
    assert first.id not in await desk.dump()
    (await desk.here.run("webhook", "list", desk.account_id, VAULTEVENTS_MASTER_KEY=NEW)).ok()
    assert "give the right one" in (await desk.here.run("webhook", "list", desk.account_id)).error


async def test_what_is_missing_or_given_twice_is_reported(desk: Desk, tmp_path: Path) -> None:
    old = desk.key_file.read_text()
    new_file = tmp_path / "new.key"
    given = {"VAULTEVENTS_MASTER_KEY": old}
    nothing = await desk.rotate(**given)
    assert nothing.error.startswith("there is no new master key: name its file with --new-key-file")
    missing = await desk.rotate("--new-key-file", str(new_file), **given)
    assert (
        missing.error
        == f"the master key file {new_file} is missing: make one with 'openssl rand -base64 32', mode 0600"
    )
    new_file.write_text(NEW)
    twice = await desk.rotate("--new-key-file", str(new_file), VAULTEVENTS_NEW_MASTER_KEY=NEW, **given)
    assert "both name a new master key: give one of them" in twice.error
    wrong = await desk.rotate("--new-key-file", str(new_file), VAULTEVENTS_MASTER_KEY=OLD)
    assert "give the right one" in wrong.error
    assert NEW not in "".join(one.stderr + one.stdout for one in (nothing, missing, twice, wrong))
    done = (await desk.rotate("--new-key-file", str(new_file), **given)).ok()
    assert "Make it the master key of the configuration" in done.stdout
    assert parse_master_key(old).id not in await desk.dump()
    assert (await desk.rotate("--json", VAULTEVENTS_NEW_MASTER_KEY=NEW, **given)).ok().json["resealed"] == 0


async def test_a_secret_is_rotated_and_shown_once(desk: Desk) -> None:
    account_id, former = desk.account_id, desk.hook.secret
    (listed,) = (await desk.here.run("webhook", "list", account_id, "--json")).ok().json["webhooks"]
    command = ("webhook", "rotate-secret", account_id, listed["id"])
    rotated = (await desk.here.run(*command, "--json")).ok().json
    assert rotated["id"] == listed["id"]
    assert (await desk.opened(desk.key(), listed["id"])) == [former, rotated["secretToken"]]
    left = datetime.fromisoformat(rotated["previousValidUntil"]) - datetime.now(UTC)
    assert timedelta(hours=23, minutes=50) < left <= timedelta(hours=24)

    reported = (await desk.here.run(*command, "--overlap", "0")).ok().stdout.splitlines()
    assert "the former one is not valid any longer" in reported[0]
    assert reported[1].startswith("whsec_")
    assert (await desk.opened(desk.key(), listed["id"])) == [reported[1]]

    for overlap in ("8d", "1h, 2h", "-1", "soon"):
        assert "--overlap" in (await desk.here.run(*command, f"--overlap={overlap}")).error
    unknown = await desk.here.run("webhook", "rotate-secret", account_id, "wh-x")
    assert unknown.error == f"account '{account_id}' has no webhook 'wh-x'"
