"""Read finality and validator records from beacon nodes, of which none is trusted.

Only final data is read: records come from the state `finalized` (rules C1, C4 and C5). Before each question about data
the node must show that it follows the chain and is not behind the finality that was already seen, because what one node
calls final is only complete up to there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import aiohttp

from vaultevents.chain.beacon import wire
from vaultevents.chain.beacon.node import SSZ, BeaconCounters, BeaconNode, Refused
from vaultevents.chain.beacon.routes import (
    BLINDED_BLOCKS,
    BLOCKS,
    CHECKPOINTS,
    CONFIG,
    GENESIS,
    HEADERS,
    STATE,
    SYNCING,
)
from vaultevents.chain.beacon.scan_json import ListScan, Scan
from vaultevents.chain.beacon.scan_ssz import KNOWN_FORKS, StateScan
from vaultevents.chain.beacon.validators_by_id import VALIDATORS, IdLists
from vaultevents.chain.beacon.wire import Payload
from vaultevents.chain.upstream.http import JSON, Deadlines, HttpExchange
from vaultevents.chain.upstream.network import PinnedNetwork
from vaultevents.chain.upstream.node import DataUnavailable
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import ConfigError, NodeFault, SourceUnavailable
from vaultevents.core.units import Address, Hash32, Pubkey, hex_text
from vaultevents.core.validators import ValidatorRecord

__all__ = ["BeaconChain", "BeaconIdentity", "BeaconOptions", "Finality", "ListRefused", "Payload", "Refresh", "Scan"]


_NO_STATE = frozenset({400, 401, 403, 404, 405, 406, 415, 501})
_NO_BLINDED = frozenset({400, 404, 405, 406, 415, 501})
_NO_BLOCK = frozenset({404})
_NO_LIST = frozenset({403, 404, 405, 413, 501})
_MAX_IDS = 1000
RECENT_S = 6.0


class ListRefused(DataUnavailable):
    """The node does not give the list of all validators, although it gives validators by their ids."""


@dataclass(frozen=True, slots=True)
class BeaconOptions:
    """Settings of the beacon chain; the defaults fit a node of one's own on mainnet.

    `tail`: how many ids after the last known one are asked for. `head_lag_slots`: a node whose head is further behind
    the clock, or behind its own peers, is not asked. `ssz`: scan the whole state of the debug routes where a node
    offers it, else the JSON list. A scan may last `scan_total_s` and stand still for `scan_idle_s`. `strict`: finality
    follows the rules of public networks, which a development chain may break.
    """

    ids_per_post: int = 1000
    ids_per_get: int = 20
    tail: int = 64
    head_lag_slots: int = 64
    ssz: bool = False
    strict: bool = False
    connect_timeout_s: float = 5.0
    total_timeout_s: float = 30.0
    scan_total_s: float = 900.0
    scan_idle_s: float = 90.0
    answer_limit_bytes: int = 32 * 2**20
    attempts: int = 3
    retry_wait_s: float = 0.25
    set_aside_s: float = 30.0

    def __post_init__(self) -> None:
        counts = (self.ids_per_post, self.ids_per_get, self.tail, self.head_lag_slots, self.attempts)
        if min(counts) < 1 or self.answer_limit_bytes < 1:
            raise ConfigError("sizes, limits and attempts of the beacon chain must be at least 1")
        if self.ids_per_post > _MAX_IDS or self.tail > _MAX_IDS:
            raise ConfigError(f"ids_per_post and tail of the beacon chain must be at most {_MAX_IDS}")
        if min(self.connect_timeout_s, self.total_timeout_s, self.scan_total_s, self.scan_idle_s) <= 0:
            raise ConfigError("deadlines of the beacon chain cannot be 0 or negative")
        if min(self.retry_wait_s, self.set_aside_s) < 0:
            raise ConfigError("times of the beacon chain cannot be negative")

    @property
    def deadlines(self) -> Deadlines:
        """The deadlines of all exchanges but scans."""
        return Deadlines(self.connect_timeout_s, self.total_timeout_s)

    @property
    def scan_deadlines(self) -> Deadlines:
        return Deadlines(self.connect_timeout_s, self.scan_total_s, self.scan_idle_s)


@dataclass(frozen=True, slots=True)
class BeaconIdentity:
    """What distinguishes one beacon chain from another, and how it counts time (rule E10)."""

    genesis_validators_root: Hash32
    time: ChainTime

    def __str__(self) -> str:
        return f"genesis_validators_root {hex_text(self.genesis_validators_root)}, {self.time}"


@dataclass(frozen=True, slots=True)
class Finality:
    """The finalized checkpoint, and the slot of its block, which may lie before the first slot of `epoch`."""

    epoch: int
    root: Hash32
    block_slot: int


@dataclass(frozen=True, slots=True)
class Refresh:
    """One node's finality and, of its finalized state, the records that were asked for and the newest, by index."""

    finality: Finality
    records: list[ValidatorRecord]
    newest: list[ValidatorRecord]


class BeaconChain(PinnedNetwork[BeaconNode, BeaconIdentity, BeaconCounters]):
    """Async context manager over the beacon nodes of one network, the first URL preferred.

    Every method raises `SourceUnavailable` when no node can answer (or its child `NodeFault`), and `WrongNetwork` when
    no node belongs to the expected network. `clock` gives the time in s, by which the lag of a head is judged.
    """

    def __init__(
        self, urls: Sequence[str], options: BeaconOptions | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._options = options or BeaconOptions()
        super().__init__("beacon", urls, self._options.deadlines, BeaconCounters())
        self._clock = clock
        self._id_lists = IdLists(self._options.ids_per_post, self._options.ids_per_get, self.counters)
        self._highest: Finality | None = None
        self._asked_at = 0.0
        self._answers: dict[tuple[str, str], tuple[float, bytes]] = {}
        self._in_sync: dict[str, int] = {}

    def _node(self, url: str, session: aiohttp.ClientSession) -> BeaconNode:
        options = self._options
        client = self._client(
            url, attempts=options.attempts, wait_s=options.retry_wait_s, set_aside_s=options.set_aside_s
        )
        http = HttpExchange(client, session, options.deadlines)
        return BeaconNode(url, http, options.scan_deadlines, self.counters, answer_bytes=options.answer_limit_bytes)

    async def _identify(self, node: BeaconNode) -> BeaconIdentity:
        return await _identity(node)

    async def finality(self) -> Finality:
        """The newest finality of the node in use; never older than what this object has seen before."""
        return self._seen(await self._open.ask(self._finality, hedge=True))

    def _seen(self, found: Finality) -> Finality:
        if self._highest is None or found.epoch >= self._highest.epoch:  # two may ask at the same time
            self._highest = found
        return self._highest

    async def finalized_epoch(self) -> int:
        """The finalized epoch of the node in use: one small call, to see whether there is anything new to read.

        It is not proven as in `finality`. That the node follows the chain is looked at once an epoch, because one that
        does not has nothing new either. While by the rules of the chain no later epoch can be final, no node is asked.
        """
        if self._highest is not None and not self._finality_due(self._highest):
            return self._highest.epoch
        self._asked_at = time.monotonic()
        return await self._open.ask(self._finalized_epoch, hedge=True)

    def _finality_due(self, known: Finality) -> bool:
        """Whether a later epoch can be final, or a wrong clock may be the cause that none seems to be."""
        if self._expected is None or not self._options.strict:
            return True
        chain_time = self._expected.time
        is_long = time.monotonic() - self._asked_at >= chain_time.epoch_s
        return is_long or chain_time.may_finalize(chain_time.first_slot(known.epoch), int(self._clock()))

    async def _recent(self, node: BeaconNode, path: str) -> bytes:
        """The body of a small answer, which on public networks may be up to `RECENT_S` old by the clock."""
        now_s = self._clock()
        kept = self._answers.get((node.name, path))
        if self._options.strict and kept is not None and 0 <= now_s - kept[0] < RECENT_S:
            return kept[1]
        return await self._fresh(node, path)

    async def _fresh(self, node: BeaconNode, path: str) -> bytes:
        content = await node.get(path)
        self._answers[node.name, path] = self._clock(), content
        return content

    async def _finalized_epoch(self, node: BeaconNode) -> int:
        now_s = int(self._clock())
        if self._expected is not None and now_s >= self._expected.time.genesis_s:
            current_epoch = self._expected.time.epoch_at(now_s)
            if self._in_sync.get(node.name) != current_epoch:
                await self._check_sync(node)
                self._in_sync[node.name] = current_epoch
        epoch = _checkpoint(node, await self._fresh(node, CHECKPOINTS)).epoch
        if self._highest is not None and epoch < self._highest.epoch:
            raise SourceUnavailable(
                node.name,
                f"is behind: its finalized epoch is {epoch}, but epoch {self._highest.epoch} was final before",
            )
        return epoch

    async def refresh(self, indices: Iterable[int], first_new: int) -> Refresh:
        """Finality, the records of `indices`, all of which must exist, and all from index `first_new` on: of one node.

        The newest are asked for `tail` of the options at a time, in the same calls as the last known ones.
        """
        asked = sorted(set(indices))

        async def read(node: BeaconNode) -> Refresh:
            finality = await self._finality(node)
            records, newest = await self._id_lists.known_and_new(node, asked, first_new, self._options.tail)
            return Refresh(finality, records, newest)

        found = await self._open.ask(read)
        self._seen(found.finality)
        return found

    async def _finality(self, node: BeaconNode) -> Finality:
        await self._check_sync(node)
        checkpoint = _checkpoint(node, await self._recent(node, CHECKPOINTS))
        final = await self._final_header(node)
        block = final if final.root == checkpoint.root else await _header(node, hex_text(checkpoint.root))
        newer = final.root == block.root or final.slot > block.slot
        if block.root != checkpoint.root or not block.canonical or not newer:
            raise NodeFault(node.name, f"its finalized block is not that of its finalized epoch {checkpoint.epoch}")
        if self._expected is not None and block.slot > self._expected.time.first_slot(checkpoint.epoch):
            raise NodeFault(
                node.name, f"its finalized block {block.slot} is after the start of epoch {checkpoint.epoch}"
            )
        found = Finality(checkpoint.epoch, checkpoint.root, block.slot)
        await self._check_not_behind(node, found)
        return found

    async def payload(self, block: Literal["finalized"] | int) -> Payload | None:
        """Return the execution block that the finalized beacon block names, or that the block of a slot names.

        None where the node has no block there, or one from before the merge. A node that is behind, or has not reached
        the slot, is not asked.
        """
        return await self._open.ask(partial(self._payload, block), hedge=True)

    async def _payload(self, block: Literal["finalized"] | int, node: BeaconNode) -> Payload | None:
        head_slot = (await self._check_ready(node)).head_slot
        if isinstance(block, int) and block > head_slot:
            raise SourceUnavailable(node.name, f"has not reached slot {block}: its head is slot {head_slot}")
        content = await _signed_block(node, str(block))
        found = None if content is None else wire.payload(node.name, content, final=block == "finalized")
        if found is None:
            return None
        if isinstance(block, int) and found.slot != block:
            raise NodeFault(node.name, f"asked for the block of slot {block}, it answered with that of {found.slot}")
        least_slot = 0 if self._highest is None else self._highest.block_slot
        if block == "finalized" and found.slot < least_slot:
            raise SourceUnavailable(
                node.name, f"is behind: its finalized block is of slot {found.slot}, but slot {least_slot} was final"
            )
        return found

    async def validators(self, indices: Iterable[int]) -> list[ValidatorRecord]:
        """The finalized records of these validators, all of which must exist, by index, each once."""
        asked = sorted(set(indices))

        async def read(node: BeaconNode) -> list[ValidatorRecord]:
            await self._check_ready(node)
            return await self._id_lists.all_of(node, asked)

        return await self._open.ask(read) if asked else []

    async def tail(self, first_index: int) -> list[ValidatorRecord]:
        """The finalized records from `first_index` on, as many as there are, but at most `tail` of the options."""

        async def read(node: BeaconNode) -> list[ValidatorRecord]:
            await self._check_ready(node)
            return await self._id_lists.run_from(node, first_index, self._options.tail)

        return await self._open.ask(read)

    async def refresh_by_pubkey(self, indices: Iterable[int], pubkeys: Sequence[Pubkey]) -> Refresh:
        """Finality, the records of `indices`, all of which must exist, and those of `pubkeys` that do: of one node."""
        asked = sorted(set(indices))

        async def read(node: BeaconNode) -> Refresh:
            finality = await self._finality(node)
            records = await self._id_lists.all_of(node, asked)
            return Refresh(finality, records, await self._id_lists.of_pubkeys(node, pubkeys))

        found = await self._open.ask(read)
        self._seen(found.finality)
        return found

    async def deposit_contract(self) -> Address:
        """The address of the deposit contract, by the configuration of the network."""

        async def read(node: BeaconNode) -> Address:
            settings = wire.config(node.name, await node.get(CONFIG))
            return wire.deposit_contract(node.name, settings)

        return await self._open.ask(read)

    async def scan(self, vaults: frozenset[Address]) -> Scan:
        """The records of all finalized validators that pay one of `vaults`, and the number of all validators.

        Reads the whole set, some 500 MB on mainnet, in bounded memory and in short steps of the event loop. Raises
        `ListRefused` where a node refuses it and no other one gives it.
        """
        refusals: list[ListRefused] = []
        try:
            return await self._open.ask(partial(self._scan, vaults, refusals))
        except SourceUnavailable:
            if refusals:
                raise refusals[0] from None
            raise

    async def _scan(self, vaults: frozenset[Address], refusals: list[ListRefused], node: BeaconNode) -> Scan:
        await self._check_ready(node)
        self.counters.scans += 1
        if self._options.ssz and node.gives_ssz:
            scanned = await self._scan_state(vaults, node)
            if scanned is not None:
                return scanned
            node.gives_ssz = False
        listed = await self._scan_list(vaults, node)
        if isinstance(listed, Refused) and await self._id_lists.run_from(node, 0, 1):
            listed = await self._scan_list(vaults, node)  # a 404 may also mean that the state was not there
        if isinstance(listed, Refused):
            refusals.append(ListRefused(node.name, listed.problem))
            raise refusals[-1]
        return listed.finish()

    async def _scan_list(self, vaults: frozenset[Address], node: BeaconNode) -> ListScan | Refused:
        sink = await node.stream(VALIDATORS, JSON, lambda _: ListScan(node.name, vaults), _NO_LIST)
        assert sink is not None
        return sink

    async def _scan_state(self, vaults: frozenset[Address], node: BeaconNode) -> Scan | None:
        """From the SSZ of the whole state; None where the node does not offer it, or of a fork not known here."""
        settings = wire.config(node.name, await node.get(CONFIG))
        roots = wire.uint64(node.name, "its SLOTS_PER_HISTORICAL_ROOT", settings.get("SLOTS_PER_HISTORICAL_ROOT"))
        root = None if self._expected is None else self._expected.genesis_validators_root
        least_slot = 0 if self._highest is None else self._highest.block_slot

        def sink_for(headers: Mapping[str, str]) -> StateScan | None:
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            known = headers.get("eth-consensus-version", "").lower() in KNOWN_FORKS
            return StateScan(node.name, vaults, roots, root, least_slot) if kind == SSZ and known else None

        sink = await node.stream(STATE, SSZ, sink_for, _NO_STATE)
        return sink.finish() if isinstance(sink, StateScan) else None

    async def _check_ready(self, node: BeaconNode) -> wire.Syncing:
        state = await self._check_sync(node)
        if self._highest is not None:
            final = await self._final_header(node)
            await self._check_not_behind(node, Finality(self._highest.epoch, final.root, final.slot))
        return state

    async def _final_header(self, node: BeaconNode) -> wire.BlockHeader:
        return wire.header(node.name, await self._recent(node, HEADERS + "finalized"))

    async def _check_sync(self, node: BeaconNode) -> wire.Syncing:
        state = wire.syncing(node.name, await self._recent(node, SYNCING))
        self._open.note_head("head", node, state.head_slot, ahead=state.sync_distance)
        lag = state.sync_distance
        if self._expected is not None and (now_s := int(self._clock())) >= self._expected.time.genesis_s:
            lag = max(lag, self._expected.time.slot_at(now_s) - state.head_slot)
        if state.is_syncing:
            raise SourceUnavailable(node.name, f"is syncing, {lag} slots behind: wait until it has caught up")
        if lag > self._options.head_lag_slots:
            raise SourceUnavailable(node.name, f"does not follow the chain: its head slot is {lag} slots behind")
        if state.is_optimistic:
            raise SourceUnavailable(node.name, "is optimistic: its execution client has not checked its head yet")
        if state.el_offline:
            raise SourceUnavailable(node.name, "has lost its execution client (el_offline): see why that is down")
        return state

    async def _check_not_behind(self, node: BeaconNode, found: Finality) -> None:
        """Finality only grows: what was final before must be at or before what is final now, on the same chain."""
        highest = self._highest
        if highest is None or found == highest:
            return
        if found.epoch < highest.epoch or found.block_slot < highest.block_slot:
            raise SourceUnavailable(
                node.name,
                f"is behind: its finalized block is of slot {found.block_slot}, but slot {highest.block_slot} "
                f"(epoch {highest.epoch}) was final before",
            )
        if found.root == highest.root:
            return
        before = await _header(node, hex_text(highest.root)) if found.block_slot > highest.block_slot else None
        if before is None or before.root != highest.root or not before.canonical:
            raise NodeFault(
                node.name,
                f"its finalized chain does not contain the block {hex_text(highest.root)} of slot {highest.block_slot} "
                "that was final before",
            )


def _checkpoint(node: BeaconNode, content: bytes) -> wire.Checkpoint:
    checkpoint = wire.finalized_checkpoint(node.name, content)
    if checkpoint.epoch == 0:
        raise SourceUnavailable(node.name, "its chain has not finalized yet: wait for the first finalized epoch")
    return checkpoint


async def _signed_block(node: BeaconNode, block: str) -> bytes | None:
    """Return the blinded block, or the full one where a node has no blinded ones; None where there is no block."""
    if node.gives_blinded:
        blinded = await node.find(BLINDED_BLOCKS + block, _NO_BLINDED)
        if isinstance(blinded, bytes):
            return blinded
    full = await node.find(BLOCKS + block, _NO_BLOCK)
    if not isinstance(full, bytes):
        return None
    node.gives_blinded = False  # a 404 alone may also mean that the slot has no block
    return full


async def _header(node: BeaconNode, block: str) -> wire.BlockHeader:
    return wire.header(node.name, await node.get(HEADERS + block))


async def _identity(node: BeaconNode) -> BeaconIdentity:
    root, genesis_s = wire.genesis(node.name, await node.get(GENESIS))
    settings = wire.config(node.name, await node.get(CONFIG))
    return BeaconIdentity(root, wire.chain_time(node.name, genesis_s, settings))
