"""Probes of the beacon nodes: their network, head, finality, blocks, validators, and the execution chain they name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from pydantic import SecretStr

from vaultevents.chain.beacon.capabilities import (
    deposit_chain_id,
    head_slot,
    posted_ids,
    public_key_of,
    refusal_of_list,
    slot_of_root,
)
from vaultevents.chain.beacon.client import BeaconChain, BeaconIdentity, Finality
from vaultevents.chain.beacon.node import Refused
from vaultevents.chain.execution.capabilities import block_number_of
from vaultevents.chain.upstream.redaction import node_name
from vaultevents.core.errors import NodeFault, VaulteventsError
from vaultevents.core.findings import Finding, failed, passed, warned
from vaultevents.core.units import hex_text
from vaultevents.probes.execution import AHEAD_S, FINALITY_AGE_S, duration
from vaultevents.probes.probe import Probe, attempt
from vaultevents.probes.shared import Shared
from vaultevents.store.network import pinned_beacon
from vaultevents.wiring.sources import unpinned_beacon

ADVICE: Final = "See that the node runs and that beacon.urls has its URL, or name another node there"
LIST_WITHIN_S: Final = 120.0


def beacon_probes(shared: Shared) -> list[Probe]:
    """Return the probe of each beacon node, and one of the list of them."""
    urls = shared.settings.beacon.urls
    probes = [Probe(_subject(url), partial(_node, shared, url), within_s=LIST_WITHIN_S, advice=ADVICE) for url in urls]
    return [*probes, Probe("beacon.urls", partial(_together, shared))] if len(urls) > 1 else probes


async def _together(shared: Shared) -> AsyncIterator[Finding]:
    """Whether the nodes can be used beside each other: none is named twice."""
    unpinned_beacon(shared.settings, shared.settings.beacon.urls, shared.clock)
    yield passed("beacon.urls", f"{len(shared.settings.beacon.urls)} different nodes")


def _subject(url: SecretStr) -> str:
    return f"beacon node {node_name(url.get_secret_value())}"


async def _node(shared: Shared, url: SecretStr) -> AsyncIterator[Finding]:
    subject = _subject(url)
    async with unpinned_beacon(shared.settings, [url], shared.clock) as beacon:
        identity = await beacon.identity()
        if (problem := await _network_problem(shared, beacon, identity)) is not None:
            yield failed(subject, problem, "Correct beacon.urls, or use the database of that network")
            return
        beacon.expect(identity)
        finality = await beacon.finality()
        yield _finality(shared, subject, identity, finality)
        yield await attempt(f"{subject} head", partial(_head, shared, subject, beacon, identity), ADVICE)
        yield await attempt(f"{subject} blocks", partial(_blocks, subject, beacon, finality), ADVICE)
        yield await attempt(f"{subject} execution chain", partial(_execution_chain, shared, subject, beacon), ADVICE)
        yield await attempt(f"{subject} validators", partial(_validators, subject, beacon), ADVICE)
        yield await attempt(f"{subject} validator list", partial(_validator_list, shared, subject, beacon), ADVICE)


async def _network_problem(shared: Shared, beacon: BeaconChain, identity: BeaconIdentity) -> str | None:
    """Return why the node is not of the right network; None where it is."""
    shown, network = identity.genesis_validators_root, shared.network
    if network.genesis_validators_root not in (None, shown):
        return f"its genesis_validators_root is {hex_text(shown)}, which is not that of {network.name}"
    deposits = await beacon.ask(deposit_chain_id)
    if deposits not in (None, network.chain_id):
        return f"its network belongs to chain {deposits}, and the configuration is for chain {network.chain_id}"
    if await shared.pinned() is not None:
        known = await pinned_beacon(await shared.database())
        if known is not None and BeaconIdentity(*known) != identity:
            return f"it belongs to another network ({identity}) than this database ({BeaconIdentity(*known)})"
    return None


async def _head(shared: Shared, subject: str, beacon: BeaconChain, identity: BeaconIdentity) -> Finding:
    subject, slot = f"{subject} head", await beacon.ask(head_slot)
    age_s = shared.clock() - (identity.time.genesis_s + slot * identity.time.slot_ms / 1000)
    if shared.network.is_public and age_s < -AHEAD_S:
        return failed(
            subject,
            f"its head slot {slot} is {-age_s:.0f} s ahead of the clock of this host",
            "Set the clock of this host (NTP)",
        )
    return passed(subject, f"its head is slot {slot}, {duration(age_s)} old")


def _finality(shared: Shared, subject: str, identity: BeaconIdentity, finality: Finality) -> Finding:
    age_s = shared.clock() - identity.time.epoch_start_s(finality.epoch)
    if shared.network.is_public and age_s > FINALITY_AGE_S:
        return failed(
            subject,
            f"its finalized epoch {finality.epoch} is {duration(age_s)} old, and nothing after it is sent",
            "See whether the network finalizes; if it does, see why the node has stopped",
        )
    return passed(subject, f"synced, its finalized epoch is {finality.epoch}, begun {duration(age_s)} ago")


async def _blocks(subject: str, beacon: BeaconChain, finality: Finality) -> Finding:
    subject, slot = f"{subject} blocks", finality.block_slot
    by_root = await beacon.ask(partial(slot_of_root, root=finality.root))
    if by_root != slot:
        return failed(subject, f"the finalized block is of slot {slot}, and of slot {by_root} when asked by its root")
    if await beacon.payload(slot) is None:
        return failed(
            subject,
            f"it does not give the block of slot {slot}, although it is finalized",
            "Name a node in beacon.urls that serves blocks",
        )
    return passed(subject, f"the finalized block of slot {slot} is served by its root and by its slot")


async def _execution_chain(shared: Shared, subject: str, beacon: BeaconChain) -> Finding:
    """Compare the execution block in the finalized beacon block with that of the execution nodes."""
    subject, payload = f"{subject} execution chain", await beacon.payload("finalized")
    if payload is None:
        return warned(subject, "its finalized block names no execution block")
    try:
        chain = await shared.chain()
        number = (
            payload.number
            if payload.number is not None
            else await chain.ask(partial(block_number_of, block_hash=payload.hash))
        )
        header = None if number is None else await chain.header(number)
    except VaulteventsError as error:
        return warned(subject, f"not compared, because no execution node answers ({error})")
    named = f"block {'' if payload.number is None else payload.number} {hex_text(payload.hash)}"
    if header is None or header.hash != payload.hash:
        there = "do not have it" if header is None else f"have {hex_text(header.hash)} in its place"
        return failed(
            subject,
            f"its finalized block contains the execution {named}, and the execution nodes {there}",
            "Find out which of them follows the chain, and name only that one",
        )
    return passed(subject, f"its finalized block contains block {header.number} of the execution nodes")


async def _validators(subject: str, beacon: BeaconChain) -> Finding:
    subject, key = f"{subject} validators", await beacon.ask(partial(public_key_of, index=0))
    if key is None:
        return failed(subject, "its finalized state has no validator 0", ADVICE)
    answer = await beacon.ask(partial(posted_ids, ids=["0"]))
    if isinstance(answer, Refused):
        return warned(
            subject,
            f"it {answer.problem} to POST, so validators are asked by GET, in more calls",
            "Name a node with Beacon API 2.5 or newer",
        )
    if answer != [key]:
        raise NodeFault(subject, "asked by POST for validator 0, it gives other records than by GET")
    return passed(subject, "validators are served by index, by GET and POST")


async def _validator_list(shared: Shared, subject: str, beacon: BeaconChain) -> Finding:
    """Whether the validators of a vault can be found: by the list of all, or else by their public keys."""
    subject, way = f"{subject} validator list", shared.settings.beacon.validators
    if way == "deposits":
        return await _by_public_key(subject, beacon, 'beacon.validators is "deposits"')
    if shared.settings.beacon.scan == "ssz":
        state = await beacon.ask(partial(refusal_of_list, ssz=True))
        if state is None:
            return passed(subject, "the whole state is served as SSZ")
        listed = await beacon.ask(partial(refusal_of_list, ssz=False))
        if listed is None:
            return warned(
                subject,
                f"it {state.problem}, so the whole validator list is read as JSON instead",
                'Offer the debug routes, or set beacon.scan to "json"',
            )
        refused = listed
    else:
        listed = await beacon.ask(partial(refusal_of_list, ssz=False))
        if listed is None:
            return passed(subject, "the whole validator list is served")
        refused = listed
    if way == "list":
        advice = 'Name a node in beacon.urls that gives the list, or set beacon.validators to "auto"'
        return failed(subject, f"it {refused.problem}", advice)
    return await _by_public_key(subject, beacon, f"it {refused.problem}")


async def _by_public_key(subject: str, beacon: BeaconChain, reason: str) -> Finding:
    """Whether validators that are found by deposits can be asked by their public keys."""
    key = await beacon.ask(partial(public_key_of, index=0))
    by_key = None if key is None else await beacon.ask(partial(posted_ids, ids=[hex_text(key)]))
    if key is not None and by_key == [key]:
        return warned(
            subject,
            f"{reason}; validators are found by the deposits to their vaults and asked by public key, which works",
            "For the whole list name a node of your own in beacon.urls",
        )
    also = by_key.problem if isinstance(by_key, Refused) else "gives other validators"
    return failed(
        subject,
        f"{reason}, and asked by public key it {also}, so validators of vaults cannot be found",
        "Name a node in beacon.urls that gives the list or takes public keys by POST",
    )
