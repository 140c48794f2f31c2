"""The simulation contains every awkward transaction, and its truth says what `docs/events.md` says about each."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from vaultevents.devnet.acts import Act, Claim, Funding, Malformed, log_of
from vaultevents.devnet.chain import Absent, Chain, Lag
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.traffic import DECK_SIZE
from vaultevents.devnet.truth import Events, Registration, eth, expected

pytestmark = pytest.mark.integration

X, A, B = bytes.fromhex("aa" * 20), bytes.fromhex("bb" * 20), bytes.fromhex("cc" * 20)
A_TEXT = "0xbBbBBBBbbBBBbbbBbbBbbbbBBbBbbbbBbBbbBBbB"
B_TEXT = "0xCcCCccccCCCCcCCCCCCcCcCccCcCCCcCcccccccC"
QUEUE_TEXT = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"
QUEUE = bytes.fromhex(QUEUE_TEXT[2:])


def truth_of(acts: list[Act], registrations: list[Registration]) -> tuple[str, Events]:
    """The hash and the events of one transaction in block 1 (time 1,012 s) of a chain that finalizes at once."""
    chain = Chain(1, genesis_time_s=1000)
    chain.finalized = Lag(0)
    transaction = chain.transaction(map(log_of, acts))
    chain.mine([transaction])
    return "0x" + transaction.hash.hex(), expected(chain, {transaction.hash: acts}, registrations)


def test_a_vault_is_numbered_among_all_emitters_of_its_transaction() -> None:
    acts: list[Act] = [Malformed(X), Funding(A, 5), Funding(B, 7), Funding(A, 10**18)]
    both = [Registration("acme", "north", A, None, 0), Registration("acme", "south", B, None, 0)]
    tx_hash, events = truth_of(acts, both)
    stem = f"funding_received_acme_{tx_hash.upper()}"
    assert list(events) == [("acme", f"{stem}_2"), ("acme", f"{stem}_3")]
    assert (
        events["acme", f"{stem}_2"]
        == (
            f'{{"id":"{stem}_2","account_ref_id":"acme","staking_vault_id":"north","event_type":"funding_received",'
            '"severity":"info","title":"Funding received","message":"Vault north received 1.000000000000000005 ETH.",'
            f'"payload":{{"tx_hash":"{tx_hash}","amount_wei":"1000000000000000005","staking_vault_address":"{A_TEXT}"}},'
            '"created_at":1012000}'
        ).encode()
    )
    _, alone = truth_of(acts, both[1:])
    assert alone == {key: body for key, body in events.items() if key[1].endswith("_3")}


def test_the_first_emitter_keeps_the_documented_id() -> None:
    tx_hash, events = truth_of([Funding(A, 1), Funding(A, 1)], [Registration("acme", "north", A, None, 1)])
    assert list(events) == [("acme", f"funding_received_acme_{tx_hash.upper()}")]


def test_each_claim_is_an_event_of_every_vault_that_names_the_queue() -> None:
    acts: list[Act] = [Claim(QUEUE, 7, A, B, 0), Claim(QUEUE, 8, A, A, 32 * 10**18), Claim(X, 9, A, A, 1)]
    watch = [Registration("acme", "north", X, QUEUE, 0), Registration("borealis", "main", X, QUEUE, 0)]
    tx_hash, events = truth_of(acts, watch)
    names = [(account, f"withdrawal_claimed_{account}_{QUEUE_TEXT}_{n}") for n in (7, 8) for account, *_ in watch]
    assert list(events) == names
    assert (
        events[names[0]]
        == (
            f'{{"id":"{names[0][1]}","account_ref_id":"acme","staking_vault_id":"north","event_type":"withdrawal_claimed",'
            '"severity":"info","title":"Withdrawal claimed",'
            '"message":"Withdrawal request 7 of vault north paid 0 ETH.",'
            f'"payload":{{"tx_hash":"{tx_hash}","request_id":"7","recipient":"{B_TEXT}",'
            f'"owner":"{A_TEXT}","amount_eth":"0","withdrawal_queue_address":"{QUEUE_TEXT}"}},"created_at":1012000}}'
        ).encode()
    )
    assert json.loads(events[names[3]])["payload"]["amount_eth"] == "32"


@pytest.mark.parametrize("first, last, seen", [(1, None, True), (2, None, False), (0, 0, False), (0, 1, True)])
def test_a_registration_counts_for_its_blocks_only(first: int, last: int | None, seen: bool) -> None:
    _, events = truth_of([Funding(A, 1)], [Registration("acme", "north", A, None, first, last)])
    assert bool(events) is seen


def test_nothing_is_expected_that_is_not_final() -> None:
    simulation = Simulation(1)
    simulation.history(20, events=60)
    final = simulation.expected()
    everything = simulation.expected(through=simulation.chain.head.number)
    assert final.items() <= everything.items()
    assert len(everything) == simulation.events
    simulation.chain.finalized = Absent.NULL
    assert simulation.expected() == {}


@pytest.mark.parametrize(
    "wei, text",
    [
        (0, "0"),
        (1, "0.000000000000000001"),
        (10**15, "0.001"),
        (32 * 10**18, "32"),
        (1000 * 10**18, "1000"),
        (2**256 - 1, "115792089237316195423570985008687907853269984665640564039457.584007913129639935"),
    ],
)
def test_amounts_are_exact_decimals(wei: int, text: str) -> None:
    assert eth(wei) == text


def test_the_same_seed_gives_the_same_simulation() -> None:
    def simulation(seed: int) -> tuple[bytes, Events]:
        one = Simulation(seed)
        one.history(40, events=80)
        return one.chain.head.hash, one.expected()

    assert simulation(4) == simulation(4)
    assert simulation(4)[0] != simulation(5)[0]


def kinds_of(acts: tuple[Act, ...], simulation: Simulation) -> set[str]:
    """The kinds of the specification's list that a transaction belongs to."""
    accounts = {registration.address: registration.account_id for registration in reversed(simulation.registrations)}
    queues = {registration.queue for registration in simulation.registrations}
    funders = [act.vault if isinstance(act, Funding) else act.emitter for act in acts if not isinstance(act, Claim)]
    claims = [act for act in acts if isinstance(act, Claim)]
    kinds = {f"{len(funders)} fundings"} if all(funder in accounts for funder in funders) else {"foreign funding"}
    if funders and funders[0] not in accounts and set(funders) & accounts.keys():
        kinds.add("foreign emitter first")
    if any(count > 1 for count in Counter(funders).values()):
        kinds.add("same vault twice")
    if len({funder for funder in funders if funder in accounts}) > len(
        {accounts.get(funder) for funder in funders} - {None}
    ):
        kinds.add("two vaults of one account")
    if len({accounts[funder] for funder in funders if funder in accounts}) > 1:
        kinds.add("two accounts")
    ours = [claim for claim in claims if claim.queue in queues]
    kinds |= {"batch claim"} if len(ours) > 1 else set()
    kinds |= {"foreign claim"} if len(ours) < len(claims) else set()
    kinds |= {"claim of nothing"} if any(claim.amount_wei == 0 for claim in ours) else set()
    kinds |= {"owner is not recipient"} if any(claim.owner != claim.recipient for claim in ours) else set()
    return kinds if acts else {"no logs"}


def test_every_simulation_contains_every_awkward_transaction() -> None:
    simulation = Simulation(8)
    founding = len(simulation.acts)
    simulation.history(30, events=90)
    assert len(simulation.acts) >= founding + DECK_SIZE
    kinds = set[str]().union(*(kinds_of(acts, simulation) for acts in simulation.acts.values()))
    assert kinds == {
        "0 fundings", "1 fundings", "2 fundings", "3 fundings", "foreign funding", "foreign emitter first",
        "same vault twice", "two vaults of one account", "two accounts", "batch claim", "foreign claim",
        "claim of nothing", "owner is not recipient", "no logs",
    }  # fmt: skip


def test_vaults_are_funded_in_the_block_that_creates_them() -> None:
    simulation = Simulation(2)
    added = simulation.add_vault("acme", "acme-new")
    for registration in simulation.registrations:
        created = next(n for n in range(3) if simulation.chain.has_code(registration.address, n))
        funded = [placed.log.address for placed in simulation.chain.logs(created, created)]
        assert registration.address in funded
    assert added.first_block == simulation.chain.head.number
    assert any(body for key, body in simulation.expected(through=2).items() if b"acme-new" in body)


def test_density_is_what_was_asked_for() -> None:
    simulation = Simulation(3)
    before, start = simulation.events, simulation.chain.head.number
    simulation.history(600, events=2000)
    assert simulation.chain.head.number == start + 600
    assert 2000 <= simulation.events - before <= 2010
    simulation.events_per_block = 0.5
    before = simulation.events
    for _ in range(200):
        simulation.step()
    assert 90 <= simulation.events - before <= 115


def test_a_reincluded_transaction_is_expected_once_with_the_time_of_its_last_block() -> None:
    simulation = Simulation(6)
    simulation.chain.finalized = Lag(6)
    simulation.history(10, events=40)
    blocks = [block for n in (9, 10, 11) if (block := simulation.chain.block(n))]
    before = simulation.expected(through=simulation.chain.head.number)
    simulation.chain.reorg(3, [[], *(block.transactions for block in blocks)])
    after = simulation.expected(through=simulation.chain.head.number)
    assert after.keys() == before.keys()
    assert after != before


def test_times_rise_from_block_to_block_with_missed_slots_between() -> None:
    simulation = Simulation(5, missed_slot_share=0.5)
    simulation.history(50)
    times_s = [block.timestamp_s for n in range(52) if (block := simulation.chain.block(n))]
    steps = {later - earlier for earlier, later in pairwise(times_s)}
    assert steps == {12, 24, 36, 48}
