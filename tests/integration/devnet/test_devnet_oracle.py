"""The oracle of the devnet: what it publishes, and that its truth is what the service's core makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eth_abi.abi import decode
from eth_utils.address import to_checksum_address

from vaultevents.core import cid as core_cid
from vaultevents.core import merkle, reports
from vaultevents.core.events import encode, project
from vaultevents.core.logs import Log
from vaultevents.core.registry import Registry, Vault, VaultSpan
from vaultevents.core.units import Address, Hash32
from vaultevents.devnet.acts import REPORT_TOPIC, Publication
from vaultevents.devnet.chain import Lag
from vaultevents.devnet.oracle import REPORT_DECK_SIZE
from vaultevents.devnet.reportfile import Reference, Tree, VaultFees, VaultValues, report_file
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.truth import Events, Registration
from vaultevents.devnet.unixfs import cid_of

pytestmark = pytest.mark.integration

DATA = Path(__file__).resolve().parents[2] / "data" / "report"
REPORTS = ("report_update_available",)
EVERY = 4


def reporting(seed: int, decks: int = 1, **settings: Any) -> Simulation:
    simulation = Simulation(seed, report_every=EVERY, **settings)
    simulation.history(EVERY * REPORT_DECK_SIZE * decks)
    simulation.chain.finalized = Lag(0)
    return simulation


def published(simulation: Simulation) -> list[Publication]:
    return [act for acts in simulation.acts.values() for act in acts if isinstance(act, Publication)]


def of_the_oracle(simulation: Simulation) -> list[Publication]:
    return [report for report in published(simulation) if report.emitter == simulation.lazy_oracle]


# The published sample, whose calldata the compiled contract has accepted


def test_the_sample_is_written_again_byte_for_byte() -> None:
    sample = (DATA / "sample-report.json").read_bytes()
    reported, file = json.loads((DATA / "sample-report.meta.json").read_text()), json.loads(sample)
    values = [
        VaultValues(bytes.fromhex(vault[2:]), *map(int, numbers))
        for vault, *numbers in (entry["value"] for entry in file["values"])
    ]
    fees = [VaultFees(*(int(own[key]) for key in own)) for own in file["extraValues"].values()]
    reference = Reference(file["refSlot"], bytes.fromhex(file["blockHash"][2:]), file["blockNumber"], file["timestamp"])
    tree = Tree(values)
    assert report_file(tree, values, fees, reference, file["prevTreeCID"]) == sample
    assert cid_of(sample) == reported["cid"]
    assert "0x" + tree.root.hex() == reported["event"]["root"]
    found = {to_checksum_address(value.vault): "0x" + tree.calldata(value).hex() for value in values}
    assert found == reported["calldata_by_vault"]


@pytest.mark.parametrize(
    "content, cid",
    [
        (b"", "QmbFMke1KXqnYyBBWxB74N4c5SBnJMVAiMNRcGu6x1AwQH"),
        (b"hello world\n", "QmT78zSuBmuS4z925WZfrqQ1qHaJ56DQaTfyMUF7F8ff5o"),
    ],
)
def test_known_files_have_their_cid(content: bytes, cid: str) -> None:
    assert cid_of(content) == cid


@pytest.mark.parametrize("size", [1, 262_143, 262_144, 262_145, 524_289, 175 * 262_144])
def test_the_cid_of_many_chunks_is_that_of_the_core(size: int) -> None:
    content = (b"vault" * (size // 5 + 1))[:size]
    assert cid_of(content) == str(core_cid.file_cid(content))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 50])
def test_trees_and_proofs_of_every_size_hold_in_the_core(count: int) -> None:
    values = [VaultValues(bytes([at]) * 20, at, at * 10**18, 0, at, 2**256 - 1 - at) for at in range(count)]
    tree = Tree(values)
    assert len(tree.nodes) == 2 * count - 1
    for value in values:
        assert tree.nodes[tree.place(value)] == value.leaf
        *head, proof = decode(["address", *["uint256"] * 5, "bytes32[]"], tree.calldata(value)[4:])
        leaf = merkle.leaf_hash(Address(bytes.fromhex(head[0][2:])), head[1:])
        assert merkle.verify(Hash32(tree.root), leaf, [Hash32(node) for node in proof])


# The publications of a simulation


@pytest.mark.parametrize("seed", range(3))
def test_a_deck_holds_every_kind_of_publication(seed: int) -> None:
    simulation = reporting(seed)
    own, vaults = of_the_oracle(simulation), {registration.address for registration in simulation.registrations}
    sizes = [len(one.calldata) for one in own if one.cid]
    assert [one for one in own if not one.cid and one.root == bytes(32) and not one.calldata]
    assert len(vaults) - 1 in sizes and len(vaults) in sizes
    assert max(len(simulation.report_files[report.cid]) for report in own if report.cid) > 262_144
    blocks = [[log.log.address for log in simulation.chain.logs(n, n, [REPORT_TOPIC])] for n in range(EVERY, 29, EVERY)]
    assert all(blocks)
    assert [len(emitters) for emitters in blocks].count(2) == 1
    assert sum(emitters != [simulation.lazy_oracle] * len(emitters) for emitters in blocks) == 1


@pytest.mark.parametrize("seed", range(3))
def test_slots_and_times_only_rise_and_fees_add_up(seed: int) -> None:
    simulation = reporting(seed, decks=3, missed_slot_share=0.3)
    own = of_the_oracle(simulation)
    slots = [one.ref_slot for one in own]
    assert slots == sorted(set(slots))
    last_fee: dict[str, str] = {}
    previous_cid, slots_without_a_block = "", 0
    for one in own:
        assert one.timestamp_s == 1_767_225_600 + 12 * one.ref_slot
        if one.cid:
            file = json.loads(simulation.report_files[one.cid])
            assert file["prevTreeCID"] == previous_cid
            assert file["timestamp"] <= one.timestamp_s
            slots_without_a_block += file["timestamp"] < one.timestamp_s
            for (vault, _, fee, *_), _ in (entry.values() for entry in file["values"]):
                extra = file["extraValues"][vault]
                assert extra["prevFee"] == last_fee.get(vault, "0")
                parts = ("prevFee", "infraFee", "liquidityFee", "reservationFee")
                assert int(fee) == sum(int(extra[key]) for key in parts)
                last_fee[vault] = fee
        previous_cid = one.cid
    assert slots_without_a_block


def test_a_new_vault_is_in_the_reports_about_a_state_in_which_it_exists() -> None:
    simulation = reporting(2)
    added = simulation.add_vault("acme", "acme-new")
    simulation.history(EVERY * REPORT_DECK_SIZE)
    with_it = [report.ref_slot for report in of_the_oracle(simulation) if added.address in dict(report.calldata)]
    created = simulation.chain.block(added.first_block)
    assert created is not None
    assert with_it
    assert min(with_it) >= created.slot


def test_without_reports_there_is_no_oracle_and_with_them_the_traffic_stays_the_same() -> None:
    silent, loud = Simulation(7), Simulation(7, report_every=3)
    for simulation in (silent, loud):
        simulation.history(40)
    assert published(silent) == [] and not silent.report_files
    assert not silent.chain.has_code(silent.lazy_oracle, 40)
    assert loud.chain.has_code(loud.lazy_oracle, 1)
    traffic = [acts for acts in loud.acts.values() if acts and not isinstance(acts[0], Publication)]
    assert traffic == [acts for acts in silent.acts.values() if acts]
    assert silent.events == loud.events
    assert not silent.expected(event_types=REPORTS)


# The truth


def test_the_same_seed_gives_the_same_reports() -> None:
    first, second = reporting(4), reporting(4)
    assert first.report_files == second.report_files
    assert first.chain.head.hash == second.chain.head.hash


def by_core(simulation: Simulation, registrations: list[Registration]) -> Events:
    """The logs of the oracle's address and the files by CID, through the core."""
    registry = Registry(
        1,
        [
            Vault(account_id, vault_id, Address(address), None, (VaultSpan(first, last),))
            for account_id, vault_id, address, _, first, last in registrations
        ],
    )
    events: Events = {}
    for one in simulation.chain.logs(0, simulation.chain.head.number, [REPORT_TOPIC]):
        if one.log.address != simulation.lazy_oracle:
            continue
        log = Log(
            Address(one.log.address),
            tuple(map(Hash32, one.log.topics)),
            one.log.data,
            one.block.number,
            Hash32(one.block.hash),
            Hash32(one.tx_hash),
            one.log_index,
        )
        found = reports.decode(log, one.block.timestamp_s)
        assert isinstance(found, reports.ReportLog)
        if found.is_empty:
            continue
        report = reports.read_report(simulation.report_files[found.cid], found)
        for seen in reports.observe(report, found, {Address(vault.address) for vault in registrations}):
            events.update({(event.owner.account_id, event.id): encode(event) for event in project(seen, registry)})
    return events


@pytest.mark.parametrize("seed", range(4))
def test_core_and_truth_agree_on_every_event_of_a_report(seed: int) -> None:
    simulation = reporting(seed, decks=2)
    first, *others = simulation.registrations
    for registrations in (simulation.registrations, [first._replace(first_block=10, last_block=30), *others[1:]]):
        truth = simulation.expected(registrations, event_types=REPORTS)
        assert len(truth) > 30
        assert by_core(simulation, registrations) == truth


def test_an_event_of_a_report_has_the_bytes_of_the_interface() -> None:
    simulation = reporting(1)
    one = next(report for report in of_the_oracle(simulation) if report.calldata)
    watched = next(r for r in simulation.registrations if r.address == one.calldata[0][0])
    [block] = {
        placed.block for placed in simulation.chain.logs(0, 99, [REPORT_TOPIC]) if placed.log.topics[3] == one.root
    }
    event_id = f"report_update_available_acme_{watched.vault_id}_{one.timestamp_s}"
    assert (
        simulation.expected([watched._replace(account_id="acme")])["acme", event_id]
        == (
            f'{{"id":"{event_id}","account_ref_id":"acme","staking_vault_id":"{watched.vault_id}",'
            '"event_type":"report_update_available","severity":"info","title":"Report update available",'
            f'"message":"An oracle report with timestamp {one.timestamp_s} was published '
            f'for vault {watched.vault_id}.",'
            f'"payload":{{"calldata":"0x{one.calldata[0][1].hex()}","report_timestamp":"{one.timestamp_s}"}},'
            f'"created_at":{block.timestamp_s}000}}'
        ).encode()
    )
    ends_before = watched._replace(last_block=block.number - 1)
    assert ("acme", event_id) not in simulation.expected([ends_before])
