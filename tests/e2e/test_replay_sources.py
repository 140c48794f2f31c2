"""`replay` over every source on a fresh database: what can be had is restored, what cannot is named, and why."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import pytest

from command_line import Ended, Place, asking, place
from report_fixtures import final_reports, five_values, spoil, without
from simulation_fixtures import Rows, register
from timeouts import until_true
from vaultevents import config
from vaultevents.core.events import EVENT_TYPES
from vaultevents.core.reports import ReportLog
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.gateway import Gateway, Trouble
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.wiring.database import open_store

pytestmark = pytest.mark.e2e

BLOCKS = 160
SLOTS = 196
SLOTS_PER_EPOCH = 8
SLOT_S = 12  # a beacon node may be so many slots behind that no test takes as long
COUNTS = ("derived", "identical", "inserted", "different", "near_head")
HASTY = (str(Path(__file__).with_name("hasty_commands.py")),)
DEAD = "http://127.0.0.1:1/k3y-that-must-not-show"


@dataclass(slots=True)
class Sources:
    """A configured place whose simulation has validators and reports."""

    place: Place
    beacon: BeaconServer
    gateway: Gateway
    urls: dict[str, str]

    @property
    def simulation(self) -> Simulation:
        return self.place.simulation

    @property
    def reports(self) -> dict[str, ReportLog]:
        return final_reports(self.simulation)

    async def configure(self, *, beacon: str | None = None) -> None:
        """Begin with an empty schema, in which the simulation is registered; `beacon` is the URL of the beacon node."""
        self.place.schema = f"t_{uuid4().hex}"
        self.place.configure()
        beacons = "" if beacon is None else f'[beacon]\nurls = ["{beacon}"]\npoll_interval_s = 0.2\n'
        written = self.place.config.read_text()
        self.place.config.write_text(
            f'{written}{beacons}[reports]\ngateways = ["{self.urls["gateway"]}"]\npoll_interval_s = 0.2\n'
            f'[contracts]\nlazy_oracles = ["0x{self.simulation.lazy_oracle.hex()}"]\n'
        )
        async with open_store(config.load(self.place.config)) as store:
            await register(store.database, self.simulation)

    @property
    def blocks(self) -> tuple[str, ...]:
        return ("--from-block", "0", "--to-block", str(self.simulation.chain.finalized_number))

    async def replay(self, *options: str) -> Ended:
        return await self.place.run("replay", *self.blocks, "--json", *options)

    async def stored(self, server: ServerAddress) -> Rows:
        async with asking(server, self.place.schema) as connection:
            rows = await connection.fetch("select account_id, id, body from events")
        return {(row["account_id"], row["id"]): row["body"] for row in rows}

    def of_blocks(self) -> Rows:
        """The events that need no beacon node."""
        names = [name for name in EVENT_TYPES if not name.startswith("validator_")]
        return dict(self.simulation.expected(event_types=names))

    def in_range(self, events: Rows) -> Rows:
        """Those that happened up to the end of the epochs that the range of blocks touches."""
        head = self.simulation.chain.block(self.simulation.chain.finalized_number or 0)
        assert head is not None
        last_epoch = head.slot // SLOTS_PER_EPOCH
        seconds = self.simulation.chain.seconds_per_slot * SLOTS_PER_EPOCH
        genesis_s = self.simulation.chain.blocks(0, 0)[0].timestamp_s
        end_ms = (genesis_s + (last_epoch + 1) * seconds) * 1000
        return {key: body for key, body in events.items() if json.loads(body)["created_at"] < end_ms}


@asynccontextmanager
async def sources(home: Path, data_dir: Path, *, validators: int = 0, seed: int = 3) -> AsyncIterator[Sources]:
    chain = Chain(seed, genesis_time_s=int(time.time()) - SLOTS * SLOT_S, seconds_per_slot=SLOT_S)
    simulation = Simulation(seed, chain=chain, validators=validators, report_every=16, slots_per_epoch=SLOTS_PER_EPOCH)
    simulation.history(BLOCKS)
    beacon, gateway = BeaconServer(simulation.beacon), Gateway(simulation.report_files)
    async with place(home, data_dir, simulation) as found:
        found.shell = replace(found.shell, program=HASTY)
        urls = {"beacon": await beacon.start(), "gateway": await gateway.start()}
        try:
            yield Sources(found, beacon, gateway, urls)
        finally:
            await found.shell.kill_all()
            await beacon.stop()
            await gateway.stop()


async def test_one_dead_cid_costs_its_own_report_alone(tmp_path: Path, data_dir: Path, server: ServerAddress) -> None:
    async with sources(tmp_path, data_dir) as found:
        await found.configure()
        due = found.of_blocks()
        dead = list(found.reports)[1]
        left = without(due, found.reports[dead])
        found.gateway.troubles[dead] = Trouble.MISSING
        ended = await found.replay()
        assert dead in ended.error
        assert "404" in ended.error
        assert "reports.gateways" in ended.error
        assert "execution.urls" not in ended.error
        assert await found.stored(server) == left
        assert {name: ended.json[name] for name in COUNTS} == dict(
            zip(COUNTS, (len(left), 0, len(left), 0, 0), strict=True)
        )
        (failure,) = ended.json["failures"]
        assert (failure["stream"], failure["cid"], failure["kind"]) == ("reports", dead, "unavailable")
        assert failure["report"] == str(found.reports[dead].timestamp)
        print(f"{len(left)} of {len(due)} events with one dead CID of {len(found.reports)}")

        reported = await found.place.run("replay", *found.blocks)
        assert reported.code == 1
        assert f"FAILED      reports: report {found.reports[dead].timestamp} ({dead})" in reported.stdout
        shown = await found.place.run("report", "show", dead, "--json")
        assert (shown.code, shown.json["failure"], shown.json["vaults"]) == (1, "unavailable", None)

        found.gateway.troubles.clear()
        whole = (await found.replay()).ok().json
        assert (whole["identical"], whole["inserted"], whole["failures"]) == (len(left), len(due) - len(left), [])
        assert await found.stored(server) == due


async def test_a_report_of_an_unknown_form_is_named_as_such_and_closes_no_gateway(
    tmp_path: Path, data_dir: Path, server: ServerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = spoil(monkeypatch, 3, five_values)
    async with sources(tmp_path, data_dir, seed=4) as found:
        await found.configure()
        assert spoiled.cid in found.reports
        left = without(found.of_blocks(), found.reports[spoiled.cid])
        running = await found.place.shell.start("run", "--json")

        async def all_others_are_there() -> bool:
            return await found.stored(server) == left

        await until_true(all_others_are_there)
        await running.said("report_waits")
        ended = await running.end()
        assert not {"node_fault", "node_unavailable"} & {line["event"] for line in ended.ok().logs}
        nodes = {node["upstream"]: node["state"] for node in (await found.place.status())["nodes"]}
        assert nodes["ipfs"] == "closed"

        shown = await found.place.run("report", "show", spoiled.cid, "--json")
        assert shown.code == 1
        assert (shown.json["failure"], shown.json["state"]) == ("undecodable", "pending")
        assert "not in a gateway" in shown.json["advice"]
        assert "leafEncoding" in shown.error
        assert "execution.urls" not in shown.error
        reported = await found.place.run("report", "show", str(found.reports[spoiled.cid].timestamp))
        assert "failure     undecodable" in reported.stdout
        listed = (await found.place.run("report", "show", "--json")).ok().json["reports"]
        assert {item["cid"]: item["failure"] for item in listed if item["failure"]} == {spoiled.cid: "undecodable"}

        file = tmp_path / "report.json"
        file.write_bytes(found.simulation.report_files[spoiled.cid])
        imported = await found.place.run("report", "import", str(file))
        assert "leafEncoding" in imported.error, "it is the file, and cannot be read from there either"

        again = await found.replay()
        assert (again.json["identical"], again.json["inserted"]) == (len(left), 0)
        assert [(failure["cid"], failure["kind"]) for failure in again.json["failures"]] == [
            (spoiled.cid, "undecodable")
        ]
        assert found.gateway.calls[spoiled.cid] == 1, "its file is in the cache"


async def test_a_replay_on_a_fresh_database_gives_the_rows_of_a_live_run(
    tmp_path: Path, data_dir: Path, server: ServerAddress
) -> None:
    async with sources(tmp_path, data_dir, validators=40, seed=5) as found:
        await found.configure(beacon=found.urls["beacon"])
        running = await found.place.shell.start("run", "--json")

        async def all_are_there() -> bool:
            return (await found.stored(server)).keys() == set(found.simulation.expected(now_s=time.time()))

        await until_true(all_are_there)
        (await running.end()).ok()
        live = found.in_range(await found.stored(server))
        kinds = {name for name in EVENT_TYPES for _, event_id in live if event_id.startswith(name)}
        assert kinds == set(EVENT_TYPES)

        await found.configure(beacon=found.urls["beacon"])
        estimated = (await found.place.run("replay", *found.blocks, "--estimate", "--json")).ok().json
        assert {stream["stream"] for stream in estimated["streams"]} == {"logs", "reports", "withdrawals"}
        assert [one["stream"] for one in estimated["not_estimated"]] == ["validators"]
        assert await found.stored(server) == {}
        replayed = (await found.replay()).ok().json
        assert (replayed["inserted"], replayed["failures"]) == (len(live), [])
        assert await found.stored(server) == live
        audited = (await found.place.run("audit", "chain", *found.blocks, "--json")).ok().json
        assert (audited["ok"], audited["events"]["missing"], audited["reports"]["missing"]) == (True, 0, 0)
        assert audited["events"]["same"] > 0
        assert audited["reports"]["same"] >= len(found.reports)
        again = (await found.replay()).ok().json
        assert (again["identical"], again["inserted"]) == (len(live), 0)
        print(f"{len(live)} rows of six types equal; {audited['events']['same']} of two types audited")

        async with asking(server, found.place.schema) as connection:
            lost = await connection.fetchval(
                "delete from events where seq = (select min(seq) from events where event_type = 'funding_received')"
                " returning id"
            )
        broken = await found.place.run("audit", "chain", *found.blocks, "--json")
        assert (broken.code, broken.json["events"]["ids"]["missing"]) == (1, [lost])


async def test_without_a_beacon_node_the_streams_of_blocks_are_restored(
    tmp_path: Path, data_dir: Path, server: ServerAddress
) -> None:
    async with sources(tmp_path, data_dir, validators=40, seed=6) as found:
        await found.configure(beacon=DEAD)
        ended = await found.replay()
        assert await found.stored(server) == found.of_blocks()
        assert [one["stream"] for one in ended.json["failures"]] == ["withdrawals", "validators"]
        for failure in ended.json["failures"]:
            assert "cannot be reached" in failure["problem"]
            assert "beacon.urls" in failure["advice"]
        assert "beacon.urls" in ended.error
        assert "execution.urls" not in ended.error
        assert "k3y" not in ended.stdout + ended.stderr
        assert (await found.place.run("audit", "chain", *found.blocks, "--json")).ok().json["ok"] is True

        await found.configure(beacon=found.urls["beacon"])
        found.beacon.faults.rates[Fault.SYNCING] = 1.0
        syncing = await found.replay()
        assert {one["stream"] for one in syncing.json["failures"]} == {"withdrawals", "validators"}
        assert "syncing" in syncing.error
        assert "execution.urls" not in syncing.error
        found.beacon.faults.stop()
        found.beacon.node.final_epochs_back = 6
        behind = await found.replay()
        assert [one["stream"] for one in behind.json["failures"]] == ["validators"], str(behind.json["failures"])
        assert "activations and exits are known up to epoch" in behind.error
        found.beacon.node.final_epochs_back = 0
        (await found.replay()).ok()
        found.beacon.faults.rates[Fault.SYNCING] = 1.0
        assert (await found.replay()).ok().json["inserted"] == 0, "the records that are stored suffice"
        assert await found.stored(server) == found.in_range(found.simulation.expected(now_s=time.time()))


async def test_epochs_of_a_beacon_node_that_is_down_fail_stream_by_stream(
    tmp_path: Path, data_dir: Path, server: ServerAddress
) -> None:
    async with sources(tmp_path, data_dir, validators=40, seed=7) as found:
        await found.configure(beacon=DEAD)
        epochs = ("replay", "--from-epoch", "0", "--to-epoch", "3", "--json")
        ended = await found.place.run(*epochs)
        assert [failure["stream"] for failure in ended.json["failures"]] == [
            "logs",
            "reports",
            "withdrawals",
            "validators",
        ]
        assert all("beacon.urls" in failure["advice"] for failure in ended.json["failures"])
        assert await found.stored(server) == {}
        await found.configure()
        refused = await found.place.run(*epochs)
        assert "name a node in beacon.urls" in refused.error


async def test_reports_are_not_silenced_before_the_live_stream_has_read_them(
    tmp_path: Path, data_dir: Path, server: ServerAddress
) -> None:
    async with sources(tmp_path, data_dir, seed=8) as found:
        await found.configure()
        silent = await found.replay("--no-deliver")
        assert "still to be read live" in silent.error
        assert {failure["stream"] for failure in silent.json["failures"]} == {"logs", "reports"}
        assert await found.stored(server) == {}
