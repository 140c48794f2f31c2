"""Recognise vaults with the contracts that the settings name: one address, or all that factories made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.chain.execution.factory_logs import Creations, find_creation, find_upgrades, read_range
from vaultevents.chain.execution.recognition import (
    Protocol,
    implementation_of,
    made_by_factory,
    queue_problem,
    read_protocol,
    read_states,
    refusal,
)
from vaultevents.config import Settings
from vaultevents.core.creations import CreatedVault, Pool, VaultState
from vaultevents.core.errors import InputError
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, checksum

OLDER_NODE = "name a node that keeps older receipts in execution.urls"
Progress = Callable[[str, int, int], None]
"""Is called with what is read, the number of blocks or vaults that are done, and of all."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """What is known of a vault that is to be registered, at the finalized `block`.

    `created`, `pool` and `state` are None where they are not known; `notes` says why, and what else is remarkable.
    `oldest` is the first block whose logs the nodes have, if they lack some.
    """

    block: int
    created: CreatedVault | None
    pool: Pool | None
    state: VaultState | None
    oldest: int | None
    notes: tuple[str, ...]

    def creation_block(self, vault: Address) -> int:
        """Return the block in which the vault was created; raises `InputError` where it is not known."""
        if self.created is not None:
            return self.created.block
        if self.oldest is not None:
            raise InputError(
                f"{checksum(vault)} was created before block {self.oldest}, and the nodes keep no receipts of blocks "
                f"before it: give --start-block {self.oldest}, or {OLDER_NODE}"
            )
        raise InputError(
            f"no node gives the log of the creation of {checksum(vault)}: give its block with --start-block"
        )


@dataclass(frozen=True, slots=True)
class Discovered:
    """The vaults that factories made, with their states; `notes` says what could not be read."""

    block: int
    creations: Creations
    states: dict[Address, VaultState]
    notes: tuple[str, ...]


async def recognise(
    settings: Settings, chain: ExecutionChain, vault: Address, queue: Address | None, advanced: Progress
) -> Recognised:
    """Recognise `vault` and check the `queue` that was named for it.

    Without a LidoLocator only that there are contracts at both addresses is known. Raises `InputError` for what is no
    vault, or another vault's queue.
    """
    block = (await chain.final_head()).number
    if not await chain.has_code(vault):
        raise InputError(
            f"{checksum(vault)} has no code at the finalized block {block}: it is an account, or a contract of another "
            "chain or of a later block; check the address"
        )
    if settings.contracts.lido_locator is None:
        if queue is not None and not await chain.has_code(queue):
            raise InputError(f"{checksum(queue)} has no code at the finalized block {block}: check --queue")
        note = "contracts.lido_locator is not set, so it is only known that there is a contract at the address"
        return Recognised(block, None, None, None, None, (note,))
    protocol = await open_protocol(settings, chain, block)
    if not await made_by_factory(chain, protocol, vault):
        raise InputError(await refusal(chain, protocol, vault))
    if queue is not None and (problem := await queue_problem(chain, queue, vault, block)):
        raise InputError(problem)
    span, oldest = await _readable(settings.contracts.first_block, chain, block)
    created, pool = await find_creation(
        chain, protocol.factories, vault, span, lambda done, of: advanced("blocks", done, of)
    )
    states, problems = await read_states(chain, protocol, [vault], lambda _done, _of: None)
    notes = [*problems]
    if created is None:
        notes.append(_unknown_creation(oldest, pool is None))
    else:
        named = pool.queue if queue is None and pool is not None else queue
        notes += await _upgrade_notes(chain, protocol, created, named, advanced)
    if queue is not None and pool is not None and pool.queue != queue:
        notes.append(f"its pool {checksum(pool.address)} has another queue, {checksum(pool.queue)}")
    return Recognised(block, created, pool, states[vault], oldest, tuple(notes))


async def discover(
    settings: Settings, chain: ExecutionChain, factory: Address | None, from_block: int | None, advanced: Progress
) -> Discovered:
    """Read what the factories made up to the finalized block, and the state of each vault at that block.

    Raises `InputError` where the nodes do not have the logs of all these blocks.
    """
    block = (await chain.final_head()).number
    if from_block is not None and from_block > block:
        raise InputError(f"--from-block {from_block} is not final yet: the finalized block is {block}")
    protocol = await open_protocol(settings, chain, block, factory)
    span, oldest = await _readable(settings.contracts.first_block if from_block is None else from_block, chain, block)
    if oldest is not None:
        raise InputError(
            f"the nodes keep no receipts of blocks before {oldest}, so vaults created before it cannot be found: give "
            f"--from-block {oldest} for those created since, or {OLDER_NODE}"
        )
    creations = await read_range(chain, protocol.factories, span, lambda done, of: advanced("blocks", done, of))
    vaults = [created.address for created in creations.vaults]
    states, problems = await read_states(chain, protocol, vaults, lambda done, of: advanced("vaults", done, of))
    unknown = [
        f"{count} logs of {checksum(address)} are not {event} in the form that this version knows: install a version "
        "that knows the new contract"
        for (address, event), count in creations.unknown.items()
    ]
    return Discovered(block, creations, states, (*problems, *unknown))


async def open_protocol(
    settings: Settings, chain: ExecutionChain, block: int, factory: Address | None = None
) -> Protocol:
    """Read the contracts of the protocol that the settings name, or those of another `factory`."""
    contracts = settings.contracts
    return await read_protocol(
        chain,
        block,
        locator=contracts.lido_locator,
        factory=factory,
        former=contracts.former_vault_factories,
        wrapper=contracts.wrapper_factory,
    )


async def _readable(first: int, chain: ExecutionChain, head: int) -> tuple[Span, int | None]:
    """The blocks from `first` to `head` whose logs nodes have, and the first of them where it is not `first`."""
    first = min(max(1, first), head)
    oldest = await chain.oldest_with_receipts(Span(first, head))
    if oldest is None or oldest == first:
        return Span(first, head), None
    return Span(oldest, head), oldest


def _unknown_creation(oldest: int | None, without_pool: bool) -> str:
    pool = "; if it has a pool, name its queue with --queue" if without_pool else ""
    if oldest is None:
        return f"no node gives the log of its creation{pool}"
    return f"it was created before block {oldest}, of which the nodes keep no receipts{pool}"


async def _upgrade_notes(
    chain: ExecutionChain, protocol: Protocol, created: CreatedVault, queue: Address | None, advanced: Progress
) -> list[str]:
    """Say which code was replaced since the vault was created: that of all vaults, or that of its queue."""
    beacon = protocol.beacons[created.factory]
    proxies = {beacon: "the vaults of its factory", **({} if queue is None else {queue: "its queue"})}
    if created.block == protocol.block:
        return []
    since = Span(created.block + 1, protocol.block)
    found = await find_upgrades(chain, proxies, since, lambda done, of: advanced("blocks", done, of))
    notes = []
    for proxy, blocks in found.items():
        code = await implementation_of(chain, proxy, protocol.block, is_beacon=proxy == beacon)
        now = "" if code is None else f", and is now {checksum(code)}"
        at = f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {', '.join(map(str, blocks))}"
        notes.append(
            f"the implementation of {proxies[proxy]} was replaced in {at}{now}: events of another form are quarantined"
        )
    return notes
