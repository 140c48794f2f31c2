"""Find what factories made, from their logs: everything in a range, or the creation of a single vault.

a range      ─▶ the nodes' claims, span by span from its first block on ─▶ each block with logs proven by its receipts
one vault    ─▶ the nodes' claims, from the newest block down ─▶ the blocks that name it proven ─▶ its creation ends it
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.chain.execution.contracts import ContractMismatch, ContractName, decode_log, event_topic
from vaultevents.chain.execution.log_range import EmitterQuery, LogContent
from vaultevents.chain.upstream.batches import together
from vaultevents.core.creations import CreatedVault, Pool
from vaultevents.core.logs import Log
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32

T = TypeVar("T")
AT_ONCE = 4
"""So many spans are read at the same time."""

Progress = Callable[[int, int], None]
"""Is called with the number of blocks that are done, and of all."""


@dataclass(frozen=True, slots=True)
class Factories:
    """The contracts that make vaults, the present one first, and the one that makes pools for them."""

    vaults: tuple[Address, ...]
    pools: Address | None

    @property
    def query(self) -> EmitterQuery:
        """The logs in which they name what they made."""
        sources = [(event_topic("VaultFactory", "VaultCreated"), factory) for factory in self.vaults]
        if self.pools is not None:
            sources.append((event_topic("WrapperFactory", "PoolCreated"), self.pools))
        return EmitterQuery.of(sources)


@dataclass(frozen=True, slots=True)
class Creations:
    """The vaults that logs name, in chain order, and each pool by its vault.

    `unknown` counts the logs of another form than that of the ABI, by contract and event.
    """

    vaults: tuple[CreatedVault, ...]
    pools: Mapping[Address, Pool]
    unknown: Mapping[tuple[Address, str], int]


async def read_range(chain: ExecutionChain, factories: Factories, span: Span, advanced: Progress) -> Creations:
    """Read all that `factories` made in `span`, proven by the receipts of its blocks."""
    query = factories.query
    parts = await _upwards(chain, span, lambda piece: chain.read_emitted(piece, query), advanced)
    return await asyncio.to_thread(_decode, [log for logs in parts for log in logs])


async def find_creation(
    chain: ExecutionChain, factories: Factories, vault: Address, span: Span, advanced: Progress
) -> tuple[CreatedVault | None, Pool | None]:
    """Search `span` from its last block down for the creation of `vault` and for its pool; both are proven.

    The pool is made after the vault, so the search ends at the vault's creation. No state of old blocks is needed.
    """
    query = factories.query
    pool: Pool | None = None
    advanced(0, len(span))
    position = span.last
    while position >= span.first:
        wave = _wave_down(Span(span.first, position), chain.log_range_blocks)
        claims: dict[int, list[LogContent]] = {}
        for claimed in await together((partial(chain.claimed_logs, piece, query) for piece in wave), AT_ONCE):
            claims |= claimed
        for block in sorted(_naming(claims, vault), reverse=True):
            proven = _decode(await chain.read_emitted(Span(block, block), query))
            pool = pool or proven.pools.get(vault)
            for created in proven.vaults:
                if created.address == vault:
                    return created, pool
        position = wave[-1].first - 1
        advanced(span.last - position, len(span))
    return None, pool


async def find_upgrades(
    chain: ExecutionChain, proxies: Iterable[Address], span: Span, advanced: Progress
) -> dict[Address, list[int]]:
    """Return the blocks of `span` in which proxies or beacons got another implementation, as the nodes claim."""
    topic = event_topic("OssifiableProxy", "Upgraded")
    query = EmitterQuery.of((topic, proxy) for proxy in proxies)
    found: dict[Address, list[int]] = {}
    for claims in await _upwards(chain, span, lambda piece: chain.claimed_logs(piece, query), advanced):
        for log in _claimed(claims):
            blocks = found.setdefault(log.address, [])
            if log.block_number not in blocks:
                blocks.append(log.block_number)
    return found


async def _upwards(
    chain: ExecutionChain, span: Span, read: Callable[[Span], Awaitable[T]], advanced: Progress
) -> list[T]:
    """Read a range in spans of as many blocks as the preferred node gives at once."""
    parts: list[T] = []
    advanced(0, len(span))
    position = span.first
    while position <= span.last:
        wave = _wave(Span(position, span.last), chain.log_range_blocks)
        parts += await together((partial(read, piece) for piece in wave), AT_ONCE)
        position = wave[-1].last + 1
        advanced(position - span.first, len(span))
    return parts


def _wave(span: Span, size: int) -> Sequence[Span]:
    """The first spans of `size` blocks, as many as are read at once."""
    firsts = range(span.first, min(span.last + 1, span.first + AT_ONCE * size), size)
    return [Span(first, min(span.last, first + size - 1)) for first in firsts]


def _wave_down(span: Span, size: int) -> Sequence[Span]:
    """The last spans of `size` blocks, the highest first."""
    lasts = range(span.last, max(span.first - 1, span.last - AT_ONCE * size), -size)
    return [Span(max(span.first, last - size + 1), last) for last in lasts]


def _naming(claims: Mapping[int, Sequence[LogContent]], vault: Address) -> set[int]:
    """The blocks in which a node claims the creation of the vault or of its pool."""
    found = set()
    for log in _claimed(claims):
        if b"".join((*log.topics, log.data)).find(vault) < 0:
            continue
        claimed = _decode([log])
        if vault in claimed.pools or any(created.address == vault for created in claimed.vaults):
            found.add(log.block_number)
    return found


def _claimed(claims: Mapping[int, Sequence[LogContent]]) -> Iterator[Log]:
    """The claimed logs in the order of their blocks, with nothing of what only a proof gives; other text is no log."""
    unknown = Hash32(bytes(32))
    for block, contents in sorted(claims.items()):
        for address, topics, data, _ in contents:
            try:
                words = tuple(Hash32(bytes.fromhex(topic[2:])) for topic in topics)
                yield Log(
                    Address(bytes.fromhex(address[2:])), words, bytes.fromhex(data[2:]), block, unknown, unknown, 0
                )
            except ValueError:
                continue


def _decode(logs: Iterable[Log]) -> Creations:
    """Pair the vaults of `VaultCreated` with the pools of `PoolCreated`, whichever comes first."""
    made: dict[Address, Log] = {}
    pools: dict[Address, Pool] = {}
    unknown: dict[tuple[Address, str], int] = {}
    vault_created = event_topic("VaultFactory", "VaultCreated")
    for log in logs:
        contract: ContractName = "VaultFactory"
        event = "VaultCreated"
        if log.topics[0] != vault_created:
            contract, event = "WrapperFactory", "PoolCreated"
        try:
            values = decode_log(contract, event, log)
        except ContractMismatch:
            unknown[log.address, event] = unknown.get((log.address, event), 0) + 1
            continue
        if event == "VaultCreated":
            made.setdefault(values["vault"], log)
        else:
            pools[values["vault"]] = Pool(values["pool"], values["withdrawalQueue"], log.block_number)
    vaults = tuple(CreatedVault(vault, log.address, log.block_number, pools.get(vault)) for vault, log in made.items())
    return Creations(vaults, pools, unknown)
