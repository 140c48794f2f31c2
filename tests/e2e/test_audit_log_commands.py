"""Every command that changes something leaves an entry of the operator, and `audit log` lists and verifies them."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from api_fixtures import key_pair, public_pem
from command_line import Place, asking, place
from vaultevents.cli import COMMANDS, load
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.e2e

TESTS: Final = Path(__file__).parents[1]
READ_ONLY: Final = {
    *("init", "run", "check", "status", "demo", "listen", "call"),
    *("account list", "vault list", "webhook list", "webhook show", "key list", "quarantine list", "quarantine show"),
    *("report show", "report verify", "audit deliveries", "audit chain", "audit log"),
    *("event list", "event show", "event tail", "delivery list", "delivery show"),
}
"""Commands that change nothing that is an administrator's to change."""
PROVED_ELSEWHERE: Final = {
    "vault discover": "test_vaults_that_are_registered_together_are_recorded_one_by_one",
    "rotate-master-key": "test_a_rotation_of_the_master_key_is_recorded_once",
    "report import": "test_a_report_is_recorded_only_if_an_operator_resolves_it",
    "quarantine retry": "test_a_replay_is_recorded_once_and_only_if_it_changes_something",
}
"""Commands whose preparation takes long: the store function that they call is tested."""
ACTIONS: Final = {
    "account add": "account.add",
    "vault add": "vault.add",
    "vault remove": "vault.remove",
    "webhook add": "webhook.create",
    "webhook pause": "webhook.pause",
    "webhook enable": "webhook.enable",
    "webhook test": "webhook.test",
    "webhook resend": "webhook.resend",
    "webhook recover": "webhook.recover",
    "webhook rotate-secret": "webhook.rotate_secret",
    "webhook remove": "webhook.delete",
    "key add": "key.add",
    "key rotate": "key.rotate",
    "key revoke": "key.revoke",
    "mfa enroll": "mfa.enroll",
    "mfa reset": "mfa.reset",
    "prune": "prune",
    "replay": "replay",
    "report give-up": "report.give_up",
    "quarantine dismiss": "quarantine.dismiss",
    "console": "console.link",
}


def commands() -> Iterator[str]:
    """Yield the names of all commands."""
    for name in COMMANDS:
        members = getattr(load(name), "commands", None)
        yield from [name] if members is None else (f"{name} {member}" for member in members)


def test_every_command_is_known_to_change_something_or_not() -> None:
    known = READ_ONLY | PROVED_ELSEWHERE.keys() | ACTIONS.keys()
    assert set(commands()) == known, "name the action of a new command, and run it below"
    defined = "".join(path.read_text() for path in (TESTS / "integration" / "store").glob("test_*.py"))
    assert [name for name in PROVED_ELSEWHERE.values() if f"def {name}(" not in defined] == []


class Operator:
    """Somebody who runs commands and looks for the entry of each."""

    def __init__(self, here: Place, server: ServerAddress) -> None:
        self.here, self.server = here, server
        self.acted: set[str] = set()

    async def acts(self, *lines: tuple[str, ...], code: int = 0, **environment: str) -> list[Any]:
        """Run commands that change something, beside each other; return the JSON of each."""
        last = await self.last()
        ended = await asyncio.gather(
            *(self.here.run(*line[0].split(), *line[1:], "--json", **environment) for line in lines)
        )
        assert {command.code for command in ended} == {code}, ended
        async with asking(self.server, self.here.schema) as connection:
            rows = await connection.fetch("select actor, action from audit_log where seq > $1", last)
        names = [line[0] for line in lines]
        assert sorted(tuple(row) for row in rows) == sorted((operator(), ACTIONS[name]) for name in names)
        self.acted |= set(names)
        return [command.json for command in ended]

    async def last(self) -> int:
        async with asking(self.server, self.here.schema) as connection:
            found: int = await connection.fetchval("select max(seq) from audit_log")
        return found

    async def execute(self, statement: str, *arguments: object) -> Any:
        async with asking(self.server, self.here.schema) as connection:
            return await connection.fetchval(statement, *arguments)


def operator() -> str:
    return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"


async def test_every_command_that_changes_something_is_recorded(
    tmp_path: Path, data_dir: Path, server: ServerAddress
) -> None:
    simulation = Simulation(4)
    async with place(tmp_path, data_dir, simulation) as here:
        (account_id, hook), *_ = sorted((await here.subscribed()).items())
        (here.home / "key.pem").write_bytes(public_pem(key_pair(0)))
        (here.home / "next.pem").write_bytes(public_pem(key_pair(1)))
        alice = Operator(here, server)
        simulation.history(20)

        final, subscribed = str(simulation.chain.finalized_number), f"wh-{account_id}-{here.schema}"
        await alice.acts(("account add", "new"), ("replay", "--from-block", "1", "--to-block", final))
        vault = ("new", "v", "0x" + "ab" * 20, "--unchecked", "--start-block", "1")
        added, key, *_ = await alice.acts(
            ("webhook add", account_id, hook.url),
            ("key add", "--account", "new", "--public-key", "key.pem"),
            ("vault add", *vault),
            ("mfa enroll", "new"),
            ("webhook resend", subscribed, await alice.execute(DELIVERED, subscribed)),
        )
        await alice.execute(REPORT)
        await alice.acts(
            ("webhook recover", added["id"], "--since", "2020-01-01T00:00:00Z"),
            ("key rotate", key["id"], "--public-key", "next.pem"),
            ("vault remove", "new", "v"),
            ("mfa reset", "new"),
            ("report give-up", "77"),
            ("quarantine dismiss", str(await alice.execute(QUARANTINED)), "--reason", "nothing of ours"),
        )
        await alice.acts(("webhook test", added["id"], "--wait", "0"), code=1)
        await alice.execute(FINISHED)
        await alice.acts(
            *(("webhook pause", added["id"]), ("key revoke", key["id"]), ("prune",), ("console",)),
            VAULTEVENTS_CONSOLE__PORT="8421",
        )
        await alice.acts(("webhook enable", added["id"]), ("webhook rotate-secret", account_id, added["id"]))
        await alice.acts(("webhook remove", account_id, added["id"]))
        assert alice.acted == ACTIONS.keys()

        await _lists_and_verifies(alice, account_id)


FINISHED = "update resends set finished_at = now() - interval '99 d', started_at = now() - interval '99 d'"
FINISHED += " where event_seq is null"
DELIVERED = "select e.id from events e join deliveries d on d.event_seq = e.seq where d.webhook_id = $1 limit 1"
REPORT = """
insert into reports (block_number, block_time_s, tx_hash, log_index, oracle, report_timestamp, ref_slot, root, cid,
    state, next_attempt_at)
values (1, 1, sha256('t'), 999, substr(sha256('a'), 1, 20), 77, 1, sha256('r'), 'bafy', 'pending', now())
"""
QUARANTINED = """
insert into quarantined_logs (stream, block_number, block_hash, log_index, tx_hash, address, topics, data, data_bytes,
    reason, more)
values ('logs', 999999, sha256('b'), 1, sha256('t'), substr(sha256('a'), 1, 20), '', '', 0, 'odd', 0)
returning id
"""


async def _lists_and_verifies(alice: Operator, account_id: str) -> None:
    """What `audit log` shows of the entries, and that it finds the one that is altered."""
    here, last = alice.here, await alice.last()
    chosen = ("--account", "new", "--action", "key", "--since", "1h", "--before", str(last))
    newest, listed, whole = await asyncio.gather(
        here.run("audit", "log", "--limit", "2", "--json"),
        here.run("audit", "log", *chosen),
        here.run("audit", "log", "--verify", "--json"),
    )
    entries = newest.ok().json["entries"]
    assert [entry["seq"] for entry in entries] == [last, last - 1]
    assert newest.json["next"] == last - 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", entries[0]["at"])
    lines = [line.split() for line in listed.ok().stdout.splitlines()[1:]]
    assert [line[2:] for line in lines] == [
        [operator(), f"key.{act}", lines[0][4], "new"] for act in ("revoke", "rotate", "add")
    ]
    head = entries[0]["hash"]
    assert whole.ok().json == {"ok": True, "rows": last, "head_hash": head, "noted_seq": None, "first_bad": None}
    await here.run("webhook", "pause", f"wh-{account_id}-{here.schema}")
    noted, other = await asyncio.gather(
        here.run("audit", "log", "--since-hash", head),
        here.run("audit", "log", "--since-hash", "ab" * 32, "--json"),
    )
    assert f"it is the hash of entry {last}\n" in noted.ok().stdout
    assert (other.code, other.json["ok"]) == (1, False)
    assert "entries were removed or replaced" in other.error
    await alice.execute("alter table audit_log disable trigger refuse_change")
    await alice.execute("update audit_log set actor = 'cli:nobody' where seq = 3")
    broken = await here.run("audit", "log", "--verify", "--json")
    assert (broken.code, broken.json["rows"], broken.json["first_bad"]["seq"]) == (1, 2, 3)
    assert broken.error.startswith("the audit log is broken at entry 3: its hash is not that of its content.")
