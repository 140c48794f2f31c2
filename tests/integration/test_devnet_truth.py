"""The devnet's truth and the service's pure core, which share no code, agree on every id and every byte."""

from __future__ import annotations

from collections import defaultdict

import pytest

from vaultevents.core import logs as core_logs
from vaultevents.core.events import encode, project
from vaultevents.core.registry import Registry, Vault, VaultSpan
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, BlockNumber, Hash32
from vaultevents.devnet.truth import Events, Registration
from vaultevents.devnet.world import World

pytestmark = pytest.mark.integration


def registry_of(registrations: list[Registration]) -> Registry:
    spans: dict[tuple[str, str, bytes, bytes | None], list[VaultSpan]] = defaultdict(list)
    for account_id, vault_id, address, queue, first, last in registrations:
        spans[account_id, vault_id, address, queue].append(VaultSpan(first, last))
    return Registry(
        1,
        [
            Vault(account_id, vault_id, Address(address), None if queue is None else Address(queue), tuple(own))
            for (account_id, vault_id, address, queue), own in spans.items()
        ],
    )


def events_by_core(world: World, registrations: list[Registration], last: int) -> Events:
    registry = registry_of(registrations)
    placed = world.chain.logs(0, last, core_logs.TOPICS)
    logs = [
        core_logs.Log(
            Address(one.log.address),
            tuple(map(Hash32, one.log.topics)),
            one.log.data,
            one.block.number,
            Hash32(one.block.hash),
            Hash32(one.tx_hash),
            one.log_index,
        )
        for one in placed
    ]
    times_s = {one.block.number: one.block.timestamp_s for one in placed}
    watched = registry.watched(Span(BlockNumber(0), BlockNumber(last)))
    found = [e for seen in core_logs.fold(logs, times_s, watched) for e in project(seen, registry)]
    return {(event.owner.account_id, event.id): encode(event) for event in found}


@pytest.mark.parametrize("seed", range(6))
def test_core_and_truth_agree(seed: int) -> None:
    world = World(seed)
    world.history(60, events=250)
    last = world.chain.finalized_number
    assert last is not None
    first, *others = world.registrations
    in_two_spans = [first._replace(last_block=20), first._replace(first_block=40), *others]
    for registrations in (world.registrations, world.registrations[1:4], in_two_spans):
        truth = world.expected(registrations)
        assert truth
        assert events_by_core(world, registrations, last) == truth
