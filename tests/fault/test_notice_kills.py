"""The daemon is killed with -9 between recording a notice for the operator and sending it: all are sent, none invented.

Receivers of customers answer 410 one after the other, so that each webhook is switched off and leaves one notice.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from command_line import PROGRAM, CommandLine, Place, Running, asking, place
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.signing import new_secret
from vaultevents.devnet.receivers import GONE, Answer, Hang, Hook, Received, Reply, always
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import EmbeddedPostgres

pytestmark = pytest.mark.fault

ACCOUNTS = tuple(f"customer{number}" for number in range(6))
LEASE_S = 3.0
BROKEN = str(Path(__file__).with_name("broken_notices_daemon.py"))
UNCLAIMED = "select count(*)::int from notices where attempts = 0"
CLAIMED = "select count(*)::int from notices where attempts > 0 and finished_at is null"
FINISHED = "select count(*)::int from notices where finished_at is not null"


@dataclass(frozen=True, slots=True)
class Stage:
    """What a moment is made of: the daemon to kill, the operator's receiver, and what is stored."""

    daemon: Running
    operator: Hook
    stored: asyncpg.Connection

    async def until(self, query: str, number: int = 1) -> None:
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while await self.stored.fetchval(query) < number:
                await asyncio.sleep(0.005)


async def recorded(stage: Stage) -> None:
    await stage.until(UNCLAIMED)
    await stage.daemon.end(signal.SIGKILL)


async def posted(stage: Stage) -> None:
    stage.operator.behaviour = always(Hang())
    await stage.operator.arrivals(len(stage.operator.ledger) + 1)
    await stage.daemon.end(signal.SIGKILL)


async def accepted(stage: Stage) -> None:
    def last_words(_id: str, _attempt: int, _nth: int) -> Answer:
        if stage.daemon.process.returncode is None:  # others may have been on their way
            stage.daemon.send_signal(signal.SIGKILL)
        return Reply()

    stage.operator.behaviour = last_words
    await stage.daemon.end(None)


MOMENTS: tuple[Callable[[Stage], Awaitable[None]], ...] = (recorded, posted, accepted)


@dataclass(frozen=True, slots=True)
class Ending:
    """The webhooks that were switched off, their notices by id, what came of them, and what each kill had cut off."""

    webhooks: frozenset[str]
    notices: dict[str, str]
    ledger: Sequence[Received]
    accepted: Sequence[Received]
    unclaimed: int
    claimed: int


@asynccontextmanager
async def growing(simulation: Simulation) -> AsyncIterator[None]:
    async def grow() -> None:
        while True:
            simulation.step()
            await asyncio.sleep(0.2)

    mining = asyncio.create_task(grow())
    try:
        yield
    finally:
        mining.cancel()


async def started(here: Place) -> Running:
    daemon = await here.shell.start("run")
    await daemon.said('"started"')
    return daemon


async def killed_again_and_again(home: Path, data_dir: Path, program: Sequence[str]) -> Ending:
    """A kill at each of the moments, again and again, and then time enough to send everything."""
    simulation = Simulation(25, accounts=ACCOUNTS, vaults_per_account=2, events_per_block=5)
    simulation.history(20, 60)
    unclaimed = claimed = 0
    with EmbeddedPostgres(data_dir / "postgres") as server:
        async with place(home, data_dir, simulation) as here, growing(simulation):
            operator = here.receivers.hook("operator")
            operator.secret = new_secret(bytes(32))
            reported = {
                "VAULTEVENTS_OPERATOR__WEBHOOK_URL": operator.url,
                "VAULTEVENTS_OPERATOR_SECRET": operator.secret,
            }
            here.shell = CommandLine(here.home, here.shell.environment | reported, program)
            here.configure(delivery=f"timeout_s = 2\nconnect_timeout_s = 1\nlease_s = {LEASE_S}")
            hooks = await here.subscribed()
            async with asking(server, here.schema) as stored:
                for number, account_id in enumerate(ACCOUNTS):
                    operator.behaviour = always(Reply())
                    daemon = await started(here)
                    hooks[account_id].behaviour = always(GONE)
                    await MOMENTS[number % len(MOMENTS)](Stage(daemon, operator, stored))
                    unclaimed += await stored.fetchval(UNCLAIMED)
                    claimed += await stored.fetchval(CLAIMED)
                operator.behaviour = always(Reply())
                daemon = await started(here)
                await Stage(daemon, operator, stored).until(FINISHED, len(ACCOUNTS))
                (await daemon.end()).ok()
                notices = {str(row["id"]): row["webhook_id"] for row in await stored.fetch("select * from notices")}
            webhooks = frozenset(f"wh-{account_id}-{here.schema}" for account_id in ACCOUNTS)
    return Ending(webhooks, notices, operator.ledger, operator.accepted, unclaimed, claimed)


def check(ending: Ending) -> None:
    """Each webhook has one notice, which was accepted at least once and always said the same, and nothing else was."""
    assert sorted(ending.notices.values()) == sorted(ending.webhooks)
    invented = {request.webhook_id for request in ending.ledger} - ending.notices.keys()
    assert not invented, f"invented: {invented}"
    unreported = ending.notices.keys() - {request.webhook_id for request in ending.accepted}
    assert not unreported, f"never reported: {unreported}"
    assert all(request.verified for request in ending.ledger)
    assert len({(request.webhook_id, request.body) for request in ending.ledger}) == len(ending.notices)
    for request in ending.ledger:
        body = json.loads(request.body)
        assert (body["id"], body["type"]) == (request.webhook_id, "webhook_disabled")
        assert body["data"]["webhook_id"] == ending.notices[request.webhook_id]


async def test_a_notice_outlives_the_process_that_was_to_deliver_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ending = await killed_again_and_again(tmp_path, tmp_path_factory.mktemp("data"), PROGRAM)
    assert ending.unclaimed and ending.claimed, "kills fell before the claim, and after it"
    assert len(ending.accepted) > len(ending.notices), "one was killed before it knew that the notice was accepted"
    check(ending)


@pytest.mark.parametrize(("broken", "problem"), [("finishes-first", "never reported"), ("renames", "invented")])
async def test_a_daemon_that_reports_too_little_or_too_much_is_caught(
    broken: str, problem: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ending = await killed_again_and_again(tmp_path, tmp_path_factory.mktemp("data"), (BROKEN, broken))
    with pytest.raises(AssertionError, match=problem):
        check(ending)
