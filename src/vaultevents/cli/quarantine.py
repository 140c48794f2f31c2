"""quarantine: logs that cannot be decoded; list and show them, read them again, dismiss them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from vaultevents.cli.options import ConfigOption, JsonOption, one_of
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, put_page, say
from vaultevents.config import Settings
from vaultevents.core.errors import InputError, SourceUnavailable
from vaultevents.core.logs import owners_of
from vaultevents.core.registry import Owner, Registry
from vaultevents.core.units import Address, checksum, hex_text, parse_address
from vaultevents.store import quarantine as store
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.quarantine import QuarantinedLog
from vaultevents.store.registry import current_registry
from vaultevents.watch.quarantine import Retried, read_again
from vaultevents.wiring.database import open_store, service_clock
from vaultevents.wiring.sources import open_sources

MOST_ROWS = 500
MOST_BLOCKS = 10_000
SHOWN_VAULTS = 5
UNAVAILABLE_IN_A_ROW = 3
"""After so many blocks that no node could give, the others are not tried."""

quarantine = typer.Typer(help="Logs that cannot be decoded: list, retry, dismiss.", no_args_is_help=True)

IdsArgument = Annotated[
    list[int] | None, typer.Argument(help="Ids, as 'quarantine list' shows them.", metavar="[ID]...", min=1)
]
AddressOption = Annotated[str | None, typer.Option("--address", help="Only logs of this contract.", metavar="ADDRESS")]


@quarantine.command("list")
def quarantine_list(
    state: Annotated[str, typer.Option(help=f"{', '.join(store.STATES)} or all.", metavar="STATE")] = "open",
    address: AddressOption = None,
    limit: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="How many at most.", metavar="N")] = 50,
    before: Annotated[
        int | None, typer.Option(min=1, help="Only those with a lower id: the next page.", metavar="ID")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List quarantined logs, newest first, with the vaults whose events are withheld."""
    one_of((*store.STATES, "all"), state, "--state")
    settings, contract = settings_of(config), _address(address)
    wanted = next((known for known in store.STATES if known == state), None)

    async def work() -> tuple[list[QuarantinedLog], Registry, int]:
        async with open_store(settings) as opened:
            rows = await store.page(opened.database, limit + 1, state=wanted, address=contract, before=before)
            async with opened.database.transaction() as connection:
                counted = await store.count_open(connection)
            return rows, await current_registry(opened.database), counted

    rows, registry, counted = complete(work())
    shown = rows[:limit]
    following = shown[-1].id if len(rows) > limit else None
    if as_json:
        put_json({"open": counted, "logs": [_facts(row, registry) for row in shown], "next": following})
        return
    put_page(
        ("id", "state", "stream", "block", "log", "more", "address", "vaults", "first seen", "reason"),
        [
            (
                *(row.id, row.state, row.stream, row.block_number, row.log_index, row.more or None),
                *(checksum(row.address), _vaults(row, registry)),
                *(row.first_seen_at.isoformat(timespec="seconds"), row.reason),
            )
            for row in shown
        ],
        following,
        "no log is quarantined" if state == "all" else f"no quarantined log is {state}",
    )


@quarantine.command("show")
def quarantine_show(
    log_id: Annotated[int, typer.Argument(help="An id, as 'quarantine list' shows it.", metavar="ID", min=1)],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one quarantined log with its topics and data, and every vault that it concerns."""
    settings = settings_of(config)

    async def work() -> tuple[list[QuarantinedLog], Registry]:
        async with open_store(settings) as opened:
            return await store.find(opened.database, [log_id]), await current_registry(opened.database)

    (row,), registry = complete(work())
    facts = {
        **_facts(row, registry),
        "vaults": [f"{owner.account_id}/{owner.vault_id}" for owner in _owners(row, registry)],
        "topics": [hex_text(topic) for topic in row.topics],
        "data": hex_text(row.data),
        "dataBytes": row.data_bytes,
    }
    if as_json:
        put_json(facts)
        return
    for key, value in facts.items():
        say(f"{key:17}{', '.join(value) if isinstance(value, list) else '-' if value is None else value}")
    if row.data_bytes > len(row.data):
        say(f"                 (the first {len(row.data)} bytes of the data; the chain has the rest)")


@quarantine.command("retry")
def quarantine_retry(
    ids: IdsArgument = None,
    every: Annotated[bool, typer.Option("--all", help="All open ones, block by block.")] = False,
    address: AddressOption = None,
    from_block: Annotated[int, typer.Option(min=0, help="With --all: the first block.", metavar="BLOCK")] = 0,
    limit: Annotated[
        int, typer.Option(min=1, max=MOST_BLOCKS, help="With --all: how many blocks at most.", metavar="N")
    ] = 1000,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read the blocks of quarantined logs again, as 'replay' does, after an upgrade that knows their form.

    Events that can be made now are stored and delivered. Exit code 1 when something of these blocks is still open.
    """
    if bool(ids) == every:
        raise typer.BadParameter("give ids, or --all")
    if ids and len(ids) > MOST_ROWS:
        raise typer.BadParameter(f"give at most {MOST_ROWS} ids at once, or --all")
    settings = settings_of(config)
    outcome = complete(_retry(settings, ids or [], _address(address), from_block, limit))
    if as_json:
        put_json(
            {
                "blocks": [_outcome(retried) for retried in outcome.blocks],
                "resolved": outcome.resolved,
                "inserted": sum(retried.inserted for retried in outcome.blocks),
                "open": sum(not retried.is_done for retried in outcome.blocks),
                "next": outcome.following,
            }
        )
    else:
        for retried in outcome.blocks:
            say(_sentence(retried))
        if not outcome.blocks:
            say("no quarantined log is open")
        if outcome.following is not None:
            say(f"more: --all --from-block {outcome.following}")
    if not all(retried.is_done for retried in outcome.blocks):
        raise typer.Exit(1)


@quarantine.command("dismiss")
def quarantine_dismiss(
    reason: Annotated[str, typer.Option("--reason", help="Why no event is to come of them.", metavar="TEXT")],
    ids: IdsArgument = None,
    address: Annotated[
        str | None, typer.Option("--address", help="All open ones of this contract.", metavar="ADDRESS")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Mark quarantined logs as of no importance. They are kept, and can be retried all the same."""
    if bool(ids) == (address is not None):
        raise typer.BadParameter("give ids, or --address")
    if not reason.strip() or not reason.isprintable() or len(reason) > 500:
        raise InputError("--reason must be 1 to 500 printable characters: say why no event is to come of these logs")
    settings = settings_of(config)
    done = complete(_dismiss(settings, ids or [], _address(address), reason))
    if as_json:
        put_json({"dismissed": len(done), "ids": done[:MOST_ROWS]})
    else:
        say(f"Dismissed {len(done)} quarantined logs; they are kept ('vaultevents quarantine list --state dismissed').")


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The blocks that were read again, and the block with which the next page begins."""

    blocks: list[Retried]
    following: int | None = None

    @property
    def resolved(self) -> int:
        return sum(len(retried.resolved) for retried in self.blocks)


async def _retry(
    settings: Settings, ids: Sequence[int], address: Address | None, from_block: int, limit: int
) -> _Outcome:
    async with open_store(settings) as opened:
        database, following = opened.database, None
        if ids:
            places = list(dict.fromkeys((row.stream, row.block_number) for row in await store.find(database, ids)))
        else:
            places = await store.open_blocks(database, limit + 1, address=address, from_block=from_block)
            if len(places) > limit:
                following = places[limit][1]
                places = places[:limit]
        if not places:
            return _Outcome([])
        clock = await service_clock(database)
        async with open_sources(settings, database, clock) as sources:
            streams = {stream.source.stream: stream for stream in sources.streams}
            outbox, blocks, unavailable = Outbox(database), [], 0
            for name, block in places:
                if unavailable == UNAVAILABLE_IN_A_ROW:
                    problem = "it was not tried, since no node could give the blocks before it"
                    blocks.append(await _unread(database, name, block, problem))
                    continue
                if name not in streams:
                    problem = f"the stream '{name}' is switched off: configure it as 'vaultevents check' says"
                    blocks.append(await _unread(database, name, block, problem))
                    continue
                try:
                    blocks.append(await read_again(streams[name], outbox, block, sources.resolver))
                    unavailable = 0
                except SourceUnavailable as error:
                    unavailable += 1
                    blocks.append(await _unread(database, name, block, str(error)))
                except InputError as error:
                    blocks.append(await _unread(database, name, block, str(error)))
            return _Outcome(blocks, following)


async def _unread(database: Database, stream: str, block: int, problem: str) -> Retried:
    rows = await store.of_block(database, stream, block)
    return Retried(stream, block, left=tuple(row for row in rows if row.state != "resolved"), problem=problem)


async def _dismiss(settings: Settings, ids: Sequence[int], address: Address | None, reason: str) -> list[int]:
    async with open_store(settings) as opened:
        if ids:
            rows = await store.find(opened.database, ids)
            if not_open := [row for row in rows if row.state != "open"]:
                raise InputError(f"the quarantined log {not_open[0].id} is {not_open[0].state}: leave it out")
            return await store.dismiss(opened.database, ids, reason)
        done: list[int] = []
        while rows := await store.page(opened.database, MOST_ROWS, address=address):
            done += await store.dismiss(opened.database, [row.id for row in rows], reason)
        if not done:
            raise InputError("no open quarantined log is of this address: see 'vaultevents quarantine list'")
        return done


def _address(text: str | None) -> Address | None:
    return None if text is None else parse_address(text)


def _owners(row: QuarantinedLog, registry: Registry) -> list[Owner]:
    return owners_of(row.topics[0], row.address, row.block_number, registry)


def _vaults(row: QuarantinedLog, registry: Registry) -> str:
    owners = [f"{owner.account_id}/{owner.vault_id}" for owner in _owners(row, registry)]
    more = len(owners) - SHOWN_VAULTS
    return ", ".join(owners[:SHOWN_VAULTS]) + (f" and {more} more" if more > 0 else "")


def _facts(row: QuarantinedLog, registry: Registry) -> dict[str, Any]:
    accounts = sorted({owner.account_id for owner in _owners(row, registry)})
    return {
        "id": row.id,
        "state": row.state,
        "stream": row.stream,
        "block": row.block_number,
        "blockHash": hex_text(row.block_hash),
        "logIndex": row.log_index,
        "txHash": hex_text(row.tx_hash),
        "address": checksum(row.address),
        "accounts": accounts,
        "more": row.more,
        "reason": row.reason,
        "dismissedBecause": row.dismissed_because,
        "firstSeenAt": row.first_seen_at,
        "changedAt": row.changed_at,
    }


def _outcome(retried: Retried) -> dict[str, Any]:
    return {
        "stream": retried.stream,
        "block": retried.block,
        "resolved": [row.id for row in retried.resolved],
        "left": [{"id": row.id, "state": row.state, "reason": row.reason} for row in retried.left],
        "inserted": retried.inserted,
        "identical": retried.identical,
        "different": list(retried.different),
        "problem": retried.problem,
    }


def _sentence(retried: Retried) -> str:
    """What came of one block, on one line."""
    parts = []
    if retried.resolved:
        named = ", ".join(str(row.id) for row in retried.resolved[:SHOWN_VAULTS])
        parts.append(f"{len(retried.resolved)} logs resolved ({named}{', ...' if len(retried.resolved) > 5 else ''})")
    parts.append(f"{retried.inserted} events stored, {retried.identical} were there")
    if retried.different:
        parts.append(
            f"{len(retried.different)} are stored otherwise and were left as they are ({retried.different[0]})"
        )
    pending = [row for row in retried.left if row.state == "open"]
    if pending:
        parts.append(f"{len(pending)} logs still open, the first is {pending[0].id}: {pending[0].reason}")
    if retried.problem is not None:
        parts.append(retried.problem)
    return f"block {retried.block} of {retried.stream}: {'; '.join(parts)}"
