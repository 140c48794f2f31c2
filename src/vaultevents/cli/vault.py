"""vault: the staking vaults that are watched."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vaultevents.cli.options import AccountArgument, ConfigOption, JsonOption
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, put_table, say
from vaultevents.cli.vault_discover import LookupProgress, discover, registrations_json, state_json
from vaultevents.config import Settings
from vaultevents.core.creations import VaultState
from vaultevents.core.errors import ConfigError, InputError, SourceUnavailable
from vaultevents.core.registry import Vault, check_id
from vaultevents.core.units import Address, checksum, parse_address
from vaultevents.store import accounts
from vaultevents.store.registry import current_registry
from vaultevents.wiring.database import Store, open_store

if TYPE_CHECKING:
    from vaultevents.chain.execution.client import ExecutionChain
    from vaultevents.wiring.vault_recognition import Recognised

vault = typer.Typer(help="Discover, add, list and remove the staking vaults that are watched.", no_args_is_help=True)

VaultArgument = Annotated[str, typer.Argument(help="The vault's id: letters, digits, hyphens.", metavar="VAULT")]
MAX_BLOCK = 2**63 - 1
"""What a database column holds."""


@vault.command("add")
def vault_add(
    account_id: AccountArgument,
    vault_id: VaultArgument,
    address: Annotated[str, typer.Argument(help="The staking vault contract.", metavar="ADDRESS")],
    queue: Annotated[
        str | None,
        typer.Option(
            help="Its withdrawal queue contract, where it is not the one that its pool names.", metavar="ADDRESS"
        ),
    ] = None,
    start_block: Annotated[
        str,
        typer.Option(
            help="First block whose events exist: a number, 'now' (after the finalized block) or 'creation' (of the "
            "vault, by the log of its factory).",
            metavar="BLOCK",
        ),
    ] = "now",
    deliver: Annotated[
        bool, typer.Option("--deliver/--no-deliver", help="Deliver events of blocks that were read before.")
    ] = True,
    unchecked: Annotated[
        bool,
        typer.Option(
            "--unchecked",
            help="Do not ask what the addresses are: for contracts of one's own, and with a number as --start-block "
            "also without a node. 'creation' then requires an archive node.",
        ),
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a vault from a block on. Give the same again with an earlier start, or with a queue, to amend it.

    The vault is recognised by its factory, and its withdrawal queue is found by its pool. The id is part of every
    event of the vault and never changes.
    """
    settings = settings_of(config)
    check_id(account_id, "an account id")
    check_id(vault_id, "a vault id")
    contract = parse_address(address)
    queue_contract = None if queue is None else parse_address(queue)
    refuse_core_queue(settings, queue_contract)
    start = _parse_start(start_block)

    async def work() -> tuple[accounts.Registered, Recognised | None, list[Vault]]:
        async with open_store(settings) as store:
            await accounts.check_addresses(store.database, account_id, vault_id, contract, queue_contract)
            if unchecked:
                found, named = None, queue_contract
                first = start if isinstance(start, int) else await _start(settings, store, contract, start)
            else:
                first, found = await _recognise(settings, store, contract, queue_contract, start)
                named = queue_contract or (found.pool.queue if found.pool is not None else None)
                refuse_core_queue(settings, named)
            others = [
                other
                for other in (await current_registry(store.database)).vaults
                if other.address == contract and other.account_id != account_id
            ]
            added = await accounts.add_vault(
                store.database, account_id, vault_id, contract, named, first, deliver=deliver
            )
            return added, found, others

    done, found, others = complete(work())
    backfills = [(span.first, span.last) for span in done.backfills]
    if as_json:
        shown = {} if found is None else {**_found_json(found), "otherRegistrations": registrations_json(others)}
        put_json({**_vault_json(done.vault), "backfills": backfills, **shown})
        return
    for line in () if found is None else _found_lines(contract, found):
        say(line)
    open_span = done.vault.spans[-1]
    say(f"Watching vault {vault_id} ({checksum(contract)}) for account {account_id} from block {open_span.first} on.")
    for other in others:
        say(f"Account {other.account_id} has it, too, as vault {other.id}: each gets its own events.")
    for first, last in backfills:
        say(f"Blocks {first} to {last} will be read again for it; 'vaultevents status' shows how far that is.")


vault.command("discover")(discover)


async def _recognise(
    settings: Settings, store: Store, contract: Address, queue: Address | None, start: int | Literal["now", "creation"]
) -> tuple[int, Recognised]:
    """Return the first block whose events exist, and what is known of the vault."""
    from vaultevents.wiring.vault_recognition import recognise

    if not settings.execution.urls:
        raise ConfigError(
            "execution.urls is empty, so the vault cannot be recognised: name a node there, or give --unchecked and a "
            "--start-block number"
        )
    try:
        async with _open_nodes(settings, store) as chain:
            with LookupProgress() as progress:
                found = await recognise(settings, chain, contract, queue, progress.advanced)
            if start == "creation" and found.created is None and settings.contracts.lido_locator is None:
                return await chain.creation_block(contract), found
    except SourceUnavailable as error:
        raise SourceUnavailable(
            error.node, f"{error.problem}; to add the vault without asking, give --unchecked and a --start-block number"
        ) from None
    if start == "now":
        return found.block + 1, found
    return (found.creation_block(contract) if start == "creation" else start), found


def _found_lines(vault: Address, found: Recognised) -> Iterator[str]:
    """What was found out about a vault, for people."""
    state, created = found.state, found.created
    if state is not None:
        what = f"{checksum(vault)} is a staking vault"
        if created is not None:
            what += f", made in block {created.block} by the factory {checksum(created.factory)}"
        connected = {True: "connected to the hub", False: "not connected to the hub"}.get(state.connected is True)
        owner, operator = (
            "unknown" if party is None else checksum(party) for party in (state.owner, state.node_operator)
        )
        yield f"{what}; owner {owner}, node operator {operator}, {connected}."
        if found.pool is not None:
            yield f"Its pool is {checksum(found.pool.address)}, with the queue {checksum(found.pool.queue)}."
        elif created is not None:
            yield "No pool was made for it, so it has no withdrawal queue."
    for note in found.notes:
        yield f"Note: {note}."


def _found_json(found: Recognised) -> dict[str, object]:
    created, pool, state = found.created, found.pool, found.state
    return {
        "creationBlock": None if created is None else created.block,
        "factory": None if created is None else checksum(created.factory),
        "pool": None if pool is None else checksum(pool.address),
        **state_json(state or VaultState(None, None, None)),
        "notes": list(found.notes),
    }


def _parse_start(text: str) -> int | Literal["now", "creation"]:
    if text == "now":
        return "now"
    if text == "creation":
        return "creation"
    if text.isascii() and text.isdigit() and (block := int(text[:20])) <= MAX_BLOCK:
        return block
    raise InputError(f"--start-block '{text}' is not a block: give a number, 'now' or 'creation'")


async def _start(settings: Settings, store: Store, contract: Address, start: Literal["now", "creation"]) -> int:
    """Return the block that a word stands for now (rule E12), always by the finalized head."""
    async with _open_nodes(settings, store) as chain:
        return (await chain.head()).number + 1 if start == "now" else await chain.creation_block(contract)


@asynccontextmanager
async def _open_nodes(settings: Settings, store: Store) -> AsyncIterator[ExecutionChain]:
    """Open the nodes at their finalized head; they are imported here, since a list of vaults needs none."""
    from vaultevents.chain.execution.client import HeadPolicy
    from vaultevents.wiring.sources import open_chain

    async with open_chain(settings, store.database, head=HeadPolicy()) as chain:
        yield chain


def refuse_core_queue(settings: Settings, queue: Address | None) -> None:
    if queue is not None and queue == settings.contracts.core_withdrawal_queue:
        raise InputError(
            f"{checksum(queue)} is the protocol's own withdrawal queue, which emits the claims of everybody: "
            "name the queue of the vault's pool"
        )


@vault.command("list")
def vault_list(
    account_id: Annotated[str | None, typer.Argument(help="Only those of this account.", metavar="[ACCOUNT]")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List vaults with the blocks for which they are registered."""
    settings = settings_of(config)

    async def work() -> Sequence[Vault]:
        async with open_store(settings) as store:
            return (await current_registry(store.database)).vaults

    found = [listed for listed in complete(work()) if account_id in (None, listed.account_id)]
    if as_json:
        put_json({"vaults": [_vault_json(listed) for listed in found]})
        return
    rows = [
        (
            listed.account_id,
            listed.id,
            checksum(listed.address),
            listed.queue and checksum(listed.queue),
            _spans_text(listed),
        )
        for listed in found
    ]
    put_table(("account", "vault", "address", "queue", "blocks"), rows, "no vaults yet: 'vaultevents vault add'")


@vault.command("remove")
def vault_remove(
    account_id: AccountArgument, vault_id: VaultArgument, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Stop watching a vault; nothing that is stored is deleted.

    Events up to the finalized block of this moment still come.
    """
    settings = settings_of(config)

    async def work() -> Vault:
        async with open_store(settings) as store, _open_nodes(settings, store) as chain:
            last = (await chain.head()).number
            return await accounts.remove_vault(store.database, account_id, vault_id, last)

    removed = complete(work())
    if as_json:
        put_json(_vault_json(removed))
    else:
        say(
            f"Vault {vault_id} of account {account_id} was watched for blocks {_spans_text(removed)}, and is no longer."
        )


def _spans_text(registered: Vault) -> str:
    return ", ".join(f"{span.first}..{'' if span.last is None else span.last}" for span in registered.spans)


def _vault_json(registered: Vault) -> dict[str, object]:
    return {
        "accountId": registered.account_id,
        "id": registered.id,
        "address": checksum(registered.address),
        "withdrawalQueueAddress": None if registered.queue is None else checksum(registered.queue),
        "spans": [{"firstBlock": span.first, "lastBlock": span.last} for span in registered.spans],
    }
