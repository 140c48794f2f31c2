"""vault discover: the vaults that factories made, with those that are registered already."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Literal, Self

import typer

from vaultevents.cli.options import ConfigOption, JsonOption
from vaultevents.cli.progress import RowProgress
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, put_table, say
from vaultevents.config import Settings
from vaultevents.core.creations import CreatedVault, VaultState, registration_id
from vaultevents.core.errors import ConfigError
from vaultevents.core.registry import Vault, check_id
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, checksum, parse_address
from vaultevents.store import accounts
from vaultevents.store.registry import current_registry
from vaultevents.wiring.database import open_store

if TYPE_CHECKING:
    from vaultevents.wiring.vault_recognition import Discovered


class LookupProgress:
    """Shows how far a search on the chain is: a bar for the blocks, then one for the vaults."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._shown: dict[str, RowProgress] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def advanced(self, what: str, done: int, expected: int) -> None:
        """Note `done` out of `expected` blocks or vaults."""
        if what not in self._shown:
            self._stack.close()
            self._shown[what] = self._stack.enter_context(RowProgress("discovery", what, what))
        self._shown[what].advanced(done, expected)


@dataclass(frozen=True, slots=True)
class _Row:
    """A discovered vault and the registrations of its address."""

    created: CreatedVault
    state: VaultState
    registered: tuple[Vault, ...]


@dataclass(frozen=True, slots=True)
class _Filter:
    owner: Address | None
    operator: Address | None
    connected: bool

    def keeps(self, state: VaultState) -> bool:
        """Test whether a vault is shown; one of which the filtered value is not known is not."""
        return (
            self.owner in (None, state.owner)
            and self.operator in (None, state.node_operator)
            and (state.connected is True or not self.connected)
        )


def discover(
    factory: Annotated[
        str | None,
        typer.Option(help="A vault factory; default: the one that the LidoLocator names.", metavar="ADDRESS"),
    ] = None,
    owner: Annotated[str | None, typer.Option(help="Only vaults of this owner.", metavar="ADDRESS")] = None,
    node_operator: Annotated[
        str | None, typer.Option(help="Only vaults of this node operator.", metavar="ADDRESS")
    ] = None,
    connected: Annotated[
        bool, typer.Option("--connected", help="Only vaults that are connected to the VaultHub.")
    ] = False,
    from_block: Annotated[
        int | None,
        typer.Option(
            min=0, help="Only vaults created from this block on; default: contracts.first_block.", metavar="BLOCK"
        ),
    ] = None,
    register: Annotated[
        str | None,
        typer.Option(
            help="Register the vaults that are shown for this account; the id of each is its address in lower case.",
            metavar="ACCOUNT",
        ),
    ] = None,
    start_block: Annotated[
        Literal["now", "creation"],
        typer.Option(help="First block whose events exist, of vaults that are registered now."),
    ] = "now",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the vaults that the protocol's factory made, up to the finalized block; register them with --register.

    The owner of a connected vault is that of its connection to the hub, usually a Dashboard. Registering again changes
    nothing for vaults that the account has or had.
    """
    settings = settings_of(config)
    made_by = None if factory is None else parse_address(factory)
    wanted = _Filter(
        None if owner is None else parse_address(owner),
        None if node_operator is None else parse_address(node_operator),
        connected,
    )
    if register is not None:
        check_id(register, "an account id")
    if made_by is None and settings.contracts.lido_locator is None:
        raise ConfigError(
            "contracts.lido_locator is not set, so the factory is not known: set it, or name the factory with --factory"
        )
    found, rows, backfills = complete(_discover(settings, made_by, from_block, wanted, register, start_block))
    if as_json:
        put_json(
            {
                "block": found.block,
                "vaults": [_row_json(row) for row in rows],
                "notes": list(found.notes),
                "backfills": [(span.first, span.last) for span in backfills],
            }
        )
        return
    columns = ("address", "owner", "node operator", "connected", "queue", "created in", "registered as")
    put_table(columns, map(_cells, rows), f"no such vaults up to block {found.block}")
    for note in found.notes:
        say(f"Note: {note}.")
    if register is not None:
        say(f"Account {register} now has {_count(rows, register)} of these {len(rows)} vaults.")
    for span in backfills:
        say(f"Blocks {span} will be read again; 'vaultevents status' shows how far that is.")


async def _discover(
    settings: Settings,
    factory: Address | None,
    from_block: int | None,
    wanted: _Filter,
    register: str | None,
    start: Literal["now", "creation"],
) -> tuple[Discovered, list[_Row], Sequence[Span]]:
    from vaultevents.chain.execution.client import HeadPolicy
    from vaultevents.wiring.sources import open_chain
    from vaultevents.wiring.vault_recognition import discover as discover_vaults

    async with open_store(settings) as store:
        if register is not None:
            await accounts.check_account(store.database, register)
        async with open_chain(settings, store.database, head=HeadPolicy()) as chain:
            with LookupProgress() as progress:
                found = await discover_vaults(settings, chain, factory, from_block, progress.advanced)
        shown = [created for created in found.creations.vaults if wanted.keeps(found.states[created.address])]
        backfills: Sequence[Span] = ()
        if register is not None:
            new = [
                accounts.NewVault(
                    registration_id(created.address),
                    created.address,
                    None if created.pool is None else created.pool.queue,
                    created.block if start == "creation" else found.block + 1,
                )
                for created in shown
            ]
            backfills = await accounts.add_vaults(store.database, register, new)
        registered: dict[Address, list[Vault]] = {}
        for vault in (await current_registry(store.database)).vaults:
            registered.setdefault(vault.address, []).append(vault)
    rows = [
        _Row(created, found.states[created.address], tuple(registered.get(created.address, ()))) for created in shown
    ]
    return found, rows, backfills


def state_json(state: VaultState) -> dict[str, object]:
    """Return owner, operator and connection of a vault for `--json`; null for what is not known."""
    return {
        "owner": None if state.owner is None else checksum(state.owner),
        "nodeOperator": None if state.node_operator is None else checksum(state.node_operator),
        "connected": state.connected,
    }


def registrations_json(vaults: Sequence[Vault]) -> list[dict[str, str]]:
    """Return under which ids accounts have registered a vault, for `--json`."""
    return [{"accountId": vault.account_id, "id": vault.id} for vault in vaults]


def _row_json(row: _Row) -> dict[str, object]:
    created, pool = row.created, row.created.pool
    return {
        "address": checksum(created.address),
        **state_json(row.state),
        "pool": None if pool is None else checksum(pool.address),
        "withdrawalQueueAddress": None if pool is None else checksum(pool.queue),
        "creationBlock": created.block,
        "factory": checksum(created.factory),
        "registrations": registrations_json(row.registered),
    }


def _cells(row: _Row) -> Sequence[object]:
    created, state = row.created, row.state
    return (
        checksum(created.address),
        state.owner and checksum(state.owner),
        state.node_operator and checksum(state.node_operator),
        {True: "yes", False: "no", None: None}[state.connected],
        created.pool and checksum(created.pool.queue),
        created.block,
        ", ".join(f"{vault.account_id}/{vault.id}" for vault in row.registered),
    )


def _count(rows: Sequence[_Row], account_id: str) -> int:
    return sum(any(vault.account_id == account_id for vault in row.registered) for row in rows)
