"""init, run, replay, check, status."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from vaultevents.chain.execution import ExecutionChain
from vaultevents.cli.console import ConfigOption, JsonOption, SpanProgress, put_json, put_table, say, settings_of
from vaultevents.config import DEFAULT_FILE, NETWORKS, Settings
from vaultevents.core.errors import ConfigError, InputError, VaulteventsError
from vaultevents.core.spans import Span
from vaultevents.daemon import ROLES, Role, open_chain, open_store, serve
from vaultevents.store import status as overview
from vaultevents.store.outbox import Outbox
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.watcher import Advanced, run

REPLAY_PATIENCE = 5


def add_to(app: typer.Typer) -> None:
    app.command("init")(init)
    app.command("run")(run_daemon)
    app.command("replay")(replay)
    app.command("check")(check)
    app.command("status")(status)


def init(
    network: Annotated[str, typer.Option(help=f"One of {', '.join(NETWORKS)}.")] = "hoodi",
    config: ConfigOption = None,
    force: Annotated[bool, typer.Option(help="Write over an existing file.")] = False,
) -> None:
    """Write a commented configuration file."""
    if network not in NETWORKS:
        raise InputError(f"there is no network '{network}': use one of {', '.join(NETWORKS)}")
    path = config or DEFAULT_FILE
    if path.exists() and not force:
        raise InputError(
            f"{path} is already there: edit it, name another file with --config, or write over it (--force)"
        )
    try:
        path.write_text(_template(network), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    say(f"Wrote {path} for {network}. Next:")
    say("  vaultevents check                                    does everything answer?")
    say("  vaultevents account add ACCOUNT                      an account, such as 'acme'")
    say("  vaultevents vault add ACCOUNT VAULT-ID 0xADDRESS     a vault of it (--queue, --start-block)")
    say("  vaultevents webhook add ACCOUNT https://URL          where its events go; shows the secret once")
    say("  vaultevents run                                      watch and deliver")


def _template(network: str) -> str:
    installed = resources.files("vaultevents").joinpath("networks", f"{network}.toml")
    if installed.is_file():
        return installed.read_text(encoding="utf-8")
    return (Path(__file__).parents[3] / "config" / f"{network}.toml").read_text(encoding="utf-8")


def run_daemon(
    config: ConfigOption = None,
    only: Annotated[list[str] | None, typer.Option(help=f"Only these roles: {', '.join(ROLES)}.")] = None,
) -> None:
    """Watch the chain and deliver webhooks until SIGTERM or Ctrl-C."""
    settings = settings_of(config)
    roles: list[Role] = [role for role in ROLES if only is None or role in only]
    if unknown := set(only or ()) - set(ROLES):
        raise InputError(f"there is no role '{min(unknown)}': use {' or '.join(ROLES)}")

    async def work() -> None:
        stop = asyncio.Event()
        with _stopping(stop), SpanProgress() as progress:
            await serve(settings, stop, only=roles, on_advance=progress.advanced)

    asyncio.run(work())


@contextmanager
def _stopping(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGTERM or Ctrl-C sets `stop`; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def first() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
        stop.set()

    for number in numbers:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def replay(
    from_block: Annotated[int, typer.Option("--from-block", min=0, help="First block.")],
    to_block: Annotated[int, typer.Option("--to-block", min=0, help="Last block; must be final.")],
    deliver: Annotated[bool, typer.Option(help="Deliver events that were missing.")] = True,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Derive the events of a range again: restores what is missing, compares what is stored.

    A stored event that differs is reported and left alone; then the exit code is 1.
    """
    settings = settings_of(config)
    if to_block < from_block:
        raise InputError(f"--to-block {to_block} lies before --from-block {from_block}")
    totals = asyncio.run(_replay(settings, Span(from_block, to_block), deliver=deliver))
    different = totals.pop("ids")
    if as_json:
        put_json(totals)
    else:
        put_table(list(totals), [list(totals.values())], "")
    for event_id in different[:20]:
        typer.echo(f"different: {event_id}", err=True)
    if different:
        raise typer.Exit(1)


async def _replay(settings: Settings, span: Span, *, deliver: bool) -> dict[str, Any]:
    inserted = identical = 0
    different: list[str] = []

    def count(step: Advanced) -> None:
        nonlocal inserted, identical
        inserted += step.committed.inserted
        identical += step.committed.identical
        different.extend(step.committed.different)
        progress.advanced(step)

    async with open_store(settings) as store, open_chain(settings, store.database) as chain:
        outbox, source = Outbox(store.database), LogsSource(chain)
        head = await source.head()
        if span.last > head:
            raise InputError(f"block {span.last} is not {settings.execution.head} yet: the last such block is {head}")
        cursor = await outbox.begin_replay(source.stream, span)
        try:
            with SpanProgress() as progress:
                await run(
                    source,
                    outbox,
                    cursor,
                    step=settings.execution.span_blocks,
                    poll_s=settings.execution.poll_interval_s,
                    deliver=deliver,
                    patience=REPLAY_PATIENCE,
                    on_advance=count,
                )
        finally:
            await outbox.end_replay(cursor)
    return {
        "derived": inserted + identical + len(different),
        "identical": identical,
        "inserted": inserted,
        "different": len(different),
        "ids": different,
    }


def check(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Does everything that the configuration names answer, and is it what it should be?"""
    settings = settings_of(config)
    results = asyncio.run(_check(settings))
    ok = all(problem is None for _, problem, _ in results)
    if as_json:
        put_json({"ok": ok, "checks": [{"what": w, "ok": p is None, "detail": p or d} for w, p, d in results]})
    else:
        put_table(("", "what", "detail"), [("ok" if p is None else "FAIL", w, p or d) for w, p, d in results], "")
    if not ok:
        raise typer.Exit(1)


async def _check(settings: Settings) -> list[tuple[str, str | None, str]]:
    """(what, problem or None, detail) for each thing that was tried."""
    results: list[tuple[str, str | None, str]] = []
    async with open_store(settings) as store:
        facts = await overview.read(store.database)
        results.append(("database", None, f"PostgreSQL {facts.server_version}, {facts.events} events"))
        for url in settings.execution.urls or (None,):
            urls = () if url is None else (url,)
            one = settings.model_copy(update={"execution": settings.execution.model_copy(update={"urls": urls})})
            try:
                async with open_chain(one, store.database) as chain:
                    head = await chain.head()
                    node = f"node {chain.nodes[0]}"
                    results.append((node, None, f"chain {settings.chain_id}, {settings.execution.head} {head.number}"))
                    results.extend(await _check_contracts(settings, chain))
            except VaulteventsError as problem:
                results.append(("node", str(problem), ""))
    return results


async def _check_contracts(settings: Settings, chain: ExecutionChain) -> list[tuple[str, str | None, str]]:
    contracts = settings.contracts
    named = [
        ("contracts.lido_locator", contracts.lido_locator),
        *(("contracts.lazy_oracles", address) for address in contracts.lazy_oracles),
        ("contracts.wrapper_factory", contracts.wrapper_factory),
        ("contracts.core_withdrawal_queue", contracts.core_withdrawal_queue),
    ]
    results: list[tuple[str, str | None, str]] = []
    for name, address in named:
        if address is not None:
            there = await chain.has_code(address)
            results.append((name, None if there else "has no code on this chain: correct the address", "a contract"))
    return results


def status(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """How far the streams are, what waits to be delivered, and what is registered."""
    settings = settings_of(config)
    facts, head = asyncio.run(_status(settings))
    if as_json:
        put_json({"network": settings.network, **facts.as_dict(), "head": head})
        return
    say(f"network     {settings.network} (chain {settings.chain_id}), {settings.execution.head} head: {head}")
    say(f"registered  {facts.accounts} accounts, {facts.vaults} vaults, {facts.webhooks} webhooks")
    say(f"events      {facts.events}")
    say(f"deliveries  {', '.join(f'{n} {state}' for state, n in sorted(facts.deliveries.items())) or 'none'}")
    if facts.oldest_pending_s is not None:
        say(f"            the oldest pending one has waited {facts.oldest_pending_s:.0f} s")
    put_table(
        ("stream", "kind", "position", "until", "behind", "moved"),
        [
            (c.stream, c.kind, c.position, c.stop, _behind(c, head), c.updated_at.isoformat(timespec="seconds"))
            for c in facts.cursors
        ],
        "no stream has been read yet: start 'vaultevents run'",
    )


async def _status(settings: Settings) -> tuple[overview.Overview, int | str]:
    async with open_store(settings) as store:
        facts = await overview.read(store.database)
        try:
            async with asyncio.timeout(5), open_chain(settings, store.database) as chain:
                return facts, (await chain.head()).number
        except (VaulteventsError, TimeoutError) as problem:
            return facts, f"unknown ({problem or 'no answer within 5 s'})"


def _behind(cursor: overview.CursorFacts, head: int | str) -> int | None:
    end = head if cursor.stop is None else cursor.stop
    return max(0, end - cursor.position) if isinstance(end, int) else None
