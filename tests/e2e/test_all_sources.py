"""The daemon with every source: six event types, replay over blocks and epochs, reports by hand, what is off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from command_line import CommandLine, Ended, asking
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.events import EVENT_TYPES
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.gateway import Gateway, Trouble
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import EmbeddedPostgres

pytestmark = pytest.mark.e2e

BLOCKS = 160


@dataclass(frozen=True, slots=True)
class Everything:
    """A simulation with validators and reports, its servers, and a command line configured for all of them."""

    simulation: Simulation
    beacon: BeaconServer
    gateway: Gateway
    shell: CommandLine
    config: Path

    async def run(self, *arguments: str) -> Ended:
        return await self.shell.run(*arguments, "--config", str(self.config))

    async def status_once(self, wanted: Callable[[str], bool]) -> str:
        """What `status` reports as soon as it is what is wanted."""
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while not wanted(reported := (await self.run("status")).ok().stdout):
                await asyncio.sleep(0.2)
        return reported

    def due(self) -> set[tuple[str, str]]:
        return set(self.simulation.expected(now_s=time.time()))


@asynccontextmanager
async def everything(home: Path) -> AsyncIterator[Everything]:
    chain = Chain(4, genesis_time_s=int(time.time()) - BLOCKS - 40, seconds_per_slot=1)
    simulation = Simulation(4, chain=chain, validators=40, report_every=25)
    simulation.history(BLOCKS)
    node, beacon, gateway = ExecutionServer(chain), BeaconServer(simulation.beacon), Gateway(simulation.report_files)
    config = home / "vaultevents.toml"
    config.write_text(
        f'network = "devnet"\nchain_id = {chain.chain_id}\ndata_dir = "data"\n'
        f'[execution]\nurls = ["{await node.start()}"]\npoll_interval_s = 0.1\n'
        f'[beacon]\nurls = ["{await beacon.start()}"]\npoll_interval_s = 0.2\n'
        f'[reports]\ngateways = ["{await gateway.start()}"]\npoll_interval_s = 0.2\n'
        f'[contracts]\nlazy_oracles = ["0x{simulation.lazy_oracle.hex()}"]\n'
        '[api]\nport = 0\n[metrics]\nserve = "off"\n'
    )
    made = Everything(simulation, beacon, gateway, CommandLine.of(home), config)
    try:
        for account_id in sorted({registration.account_id for registration in simulation.registrations}):
            (await made.run("account", "add", account_id)).ok()
        for one in simulation.registrations:
            queue = [] if one.queue is None else ["--queue", f"0x{one.queue.hex()}"]
            vault = [one.account_id, one.vault_id, f"0x{one.address.hex()}"]
            (await made.run("vault", "add", *vault, *queue, "--start-block", str(one.first_block))).ok()
        yield made
    finally:
        await made.shell.kill_all()
        await node.stop()
        await beacon.stop()
        await gateway.stop()


async def test_six_event_types_and_their_replays(tmp_path: Path) -> None:
    async with everything(tmp_path) as here:
        with EmbeddedPostgres(tmp_path / "data" / "postgres") as address:
            running = await here.shell.start("run", "--config", str(here.config))
            await running.said('"started"')
            async with asking(address, "vaultevents") as database:

                async def stored() -> set[tuple[str, str]]:
                    return {tuple(row) for row in await database.fetch("select account_id, id from events")}

                async with asyncio.timeout(WAIT_TIMEOUT_S):
                    while await stored() != here.due():
                        assert (await stored()) <= here.due()
                        await asyncio.sleep(0.2)
                kinds = {name for name in EVENT_TYPES for _, event_id in await stored() if event_id.startswith(name)}
                assert kinds == set(EVENT_TYPES)

                ended = await running.end()
                assert ended.code == 0
                head = here.simulation.chain.finalized_number
                replayed = (await here.run("replay", "--from-block", "0", "--to-block", str(head), "--json")).ok().json
                assert replayed["derived"] == replayed["identical"] > 0
                assert (replayed["inserted"], replayed["different"]) == (0, 0)

                bodies = {tuple(row) for row in await database.fetch("select id, body from events")}
                await database.execute("delete from events where event_type like 'validator_%'")
                through = int(await database.fetchval("select position from cursors where stream = 'withdrawals'"))
                again = await here.run("replay", "--from-epoch", "0", "--to-epoch", str(through), "--json")
                assert again.ok().json["inserted"] > 0
                assert again.json["different"] == 0
                now = {tuple(row) for row in await database.fetch("select id, body from events")}
                late = {body for body in bodies - now if b"validator_withdrawal" in body[1]}
                assert not late, "all withdrawals are back, byte for byte"


async def test_a_report_by_hand(tmp_path: Path) -> None:
    async with everything(tmp_path) as here:
        here.gateway.trouble = Trouble.MISSING
        with EmbeddedPostgres(tmp_path / "data" / "postgres"):
            running = await here.shell.start("run", "--config", str(here.config))
            await running.said("report_waits", times=4)
            await running.end()
            listed = (await here.run("report", "show", "--json")).ok().json["reports"]
            pending = [item for item in listed if item["state"] == "pending"]
            assert len(pending) > 2
            assert any("404" in str(one["problem"]) for one in pending)
            assert (await here.run("status")).ok().stdout.count("wait for their files") == 1

            file = tmp_path / "report.json"
            file.write_bytes(here.simulation.report_files[pending[0]["cid"]])
            resolved = (await here.run("report", "import", str(file), "--json")).ok().json["resolved"]
            assert [one["cid"] for one in resolved] == [pending[0]["cid"]]
            file.write_bytes(file.read_bytes() + b" ")
            assert "not the file of any" in (await here.run("report", "import", str(file))).error

            (await here.run("report", "give-up", pending[1]["cid"])).ok()
            assert "is pending" in (await here.run("report", "give-up", pending[1]["cid"])).error

            here.gateway.trouble = None
            verified = (await here.run("report", "verify", pending[2]["cid"], "--json")).ok().json
            assert verified["verified"] is True
            shown = (await here.run("report", "show", pending[2]["timestamp"], "--json")).ok().json
            assert all(vault["calldata"].startswith("0x4c11a509") for vault in shown["vaults"])


async def test_a_stalled_stream_says_why(tmp_path: Path) -> None:
    async with everything(tmp_path) as here:
        with EmbeddedPostgres(tmp_path / "data" / "postgres"):
            running = await here.shell.start("run", "--config", str(here.config))
            await here.status_once(lambda reported: "validators" in reported)
            here.beacon.faults.rates[Fault.SYNCING] = 1.0
            for _ in range(24):  # finality moves on, so discovery has to ask the node
                here.simulation.step()
            await running.said("discovery_waits")
            assert "syncing" in await here.status_once(lambda reported: "stalled" in reported)
            await running.end()


async def test_a_first_start_with_a_node_that_syncs_says_why_nothing_begins(tmp_path: Path) -> None:
    async with everything(tmp_path) as here:
        here.beacon.faults.rates[Fault.SYNCING] = 1.0
        with EmbeddedPostgres(tmp_path / "data" / "postgres"):
            running = await here.shell.start("run", "--config", str(here.config))
            await running.said("discovery_waits", times=2)
            said = (await here.run("status")).ok().stdout
            assert "stalled     validators, withdrawals (not begun yet)" in said
            assert "syncing" in said
            here.beacon.faults.stop()
            await running.said("validator_scan_done")
            await here.status_once(lambda reported: "stalled" not in reported)
            assert "stalled" not in (await here.run("status")).ok().stdout
            await running.end()
