"""The composition root: opens what the settings name, builds the workers, supervises them in one TaskGroup, drains."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import structlog

from vaultevents.chain.execution import ExecutionChain, ExecutionOptions, HeadPolicy, Identity
from vaultevents.config import Settings
from vaultevents.core.errors import ConfigError, DatabaseUnavailable, DatabaseUnusable, VaulteventsError, WrongNetwork
from vaultevents.core.sealing import MasterKey, parse_master_key
from vaultevents.core.units import hex_text
from vaultevents.core.webhooks import UrlRules
from vaultevents.dispatch.dispatcher import Dispatcher, DispatchOptions
from vaultevents.dispatch.sender import Sender
from vaultevents.egress import Guard
from vaultevents.store.accounts import open_stream
from vaultevents.store.clock import ServiceClock
from vaultevents.store.embedded import EmbeddedPostgres
from vaultevents.store.network import pin, pinned
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.store.pool import Database, open_database
from vaultevents.store.webhooks import sealed_key_ids
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.watcher import Advanced, run, run_backfills

log = structlog.get_logger("daemon")

T = TypeVar("T")
Role = Literal["watch", "dispatch"]
ROLES: tuple[Role, ...] = ("watch", "dispatch")
REJOIN_PAUSE_S = 0.5
START_TRIES = 20


@dataclass(frozen=True, slots=True)
class Store:
    """The open database, the key of its secrets, and the embedded server where there is one."""

    database: Database
    key: MasterKey
    embedded: EmbeddedPostgres | None


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """Opens the configured or the embedded database, brings its schema up to date and finds its master key (D2)."""
    async with AsyncExitStack() as stack:
        if settings.database_url is not None:
            embedded = None
            target = {"dsn": settings.database_url.get_secret_value()}
            database = await open_database(target, schema=settings.database_schema)
        else:
            embedded = EmbeddedPostgres(settings.directory / "postgres")
            stack.push_async_callback(asyncio.to_thread, embedded.leave)
            database = await _while_lost(partial(_open_embedded, embedded, settings.database_schema))
        stack.push_async_callback(database.close)
        key = _master_key(settings)
        if other := await _while_lost(partial(sealed_key_ids, database)) - {key.id}:
            raise DatabaseUnusable(
                f"secrets in this database are sealed with the master key {', '.join(sorted(other))}, "
                f"and the one given is {key.id}: give the right one"
            )
        yield Store(database, key, embedded)


async def _open_embedded(embedded: EmbeddedPostgres, schema: str) -> Database:
    address = await asyncio.to_thread(embedded.join)
    return await open_database(address.connect_kwargs(), schema=schema)


def _master_key(settings: Settings) -> MasterKey:
    """From the environment or a file; the embedded database gets a key file of its own (D2)."""
    if settings.master_key is not None:
        return parse_master_key(settings.master_key.get_secret_value())
    path = settings.master_key_file
    if path is None:
        if settings.database_url is not None:
            raise ConfigError(
                "database_url needs a master key, with which webhook secrets are sealed: set VAULTEVENTS_MASTER_KEY "
                "or master_key_file to 32 bytes in base64 ('openssl rand -base64 32'), and keep a copy"
            )
        path = settings.directory / "master.key"
        if not path.exists():
            _write_key(path)
    try:
        return parse_master_key(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the master key file {path}: {error}") from None


def _write_key(path: Path) -> None:
    """Whole or not at all, and never over a key that another process has just written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(name, path)
        log.info("master_key_made", path=str(path))
    except FileExistsError:
        pass
    finally:
        Path(name).unlink()


@asynccontextmanager
async def open_chain(
    settings: Settings, database: Database, *, head: HeadPolicy | None = None
) -> AsyncIterator[ExecutionChain]:
    """The execution nodes, after the first contact has shown that they are of the right network (E10)."""
    if not settings.execution.urls:
        raise ConfigError(
            "execution.urls is empty: name the URL of your execution node there or in VAULTEVENTS_EXECUTION__URLS"
        )
    options = ExecutionOptions(
        headers=settings.execution.headers,
        suspicion_share=settings.execution.suspicion_share,
        batch_size=settings.execution.batch_size,
        log_range_start=min(1000, settings.execution.max_range_blocks),
        log_range_max=settings.execution.max_range_blocks,
        total_timeout_s=settings.execution.timeout_s,
    )
    urls = [url.get_secret_value() for url in settings.execution.urls]
    async with ExecutionChain(urls, head=head or HeadPolicy.parse(settings.execution.head), options=options) as chain:
        known = await pinned(database)
        if known is not None:
            if known[0] != settings.chain_id:
                raise WrongNetwork(
                    f"this database belongs to chain {known[0]}, and the configuration says {settings.chain_id}: "
                    "use the configuration of that chain, or another database (or data_dir)"
                )
            chain.expect(Identity(*known))
        identity = await chain.identity()
        if identity.chain_id != settings.chain_id:
            raise WrongNetwork(
                f"the execution node is of chain {identity.chain_id}, and the configuration is for "
                f"{settings.network} (chain {settings.chain_id}): correct execution.urls or the configuration"
            )
        await pin(database, identity.chain_id, identity.genesis_hash)
        chain.expect(identity)
        yield chain


def url_rules(settings: Settings) -> UrlRules:
    """Which URLs webhooks may have, by the operator's settings (D10)."""
    return UrlRules(settings.delivery.ports, settings.delivery.allow, settings.delivery.deny)


async def serve(
    settings: Settings,
    stop: asyncio.Event,
    *,
    only: Collection[Role] = ROLES,
    on_advance: Callable[[Advanced], None] = lambda _: None,
) -> None:
    """Runs the chosen workers until `stop` is set, then drains: attempts in flight are finished and settled.

    A span that is being read then is dropped; it is read again at the next start. A `StreamStopped` (C8) or a bug in
    one worker ends all of them.
    """
    async with open_store(settings) as store, asyncio.TaskGroup() as group:
        keeper = group.create_task(_keep_server(store))
        watching = group.create_task(_watch(settings, store, on_advance)) if "watch" in only else None
        dispatching = group.create_task(_dispatch(settings, store, stop)) if "dispatch" in only else None
        log.info("started", network=settings.network, roles=sorted(only))
        await stop.wait()
        log.info("stopping")
        if watching is not None:
            watching.cancel()
        if dispatching is not None:
            await dispatching
        keeper.cancel()


async def _watch(settings: Settings, store: Store, on_advance: Callable[[Advanced], None]) -> None:
    outbox = Outbox(store.database)
    async with AsyncExitStack() as stack:
        chain = await _while_lost(lambda: stack.enter_async_context(open_chain(settings, store.database)))
        source = LogsSource(chain)
        live = await _while_lost(lambda: _live_cursor(source, chain, outbox))
        step, poll_s = settings.execution.span_blocks, settings.execution.poll_interval_s
        async with asyncio.TaskGroup() as group:
            group.create_task(run(source, outbox, live, step=step, poll_s=poll_s, on_advance=on_advance))
            group.create_task(run_backfills(source, outbox, step=step, poll_s=poll_s, on_advance=on_advance))


async def _live_cursor(source: LogsSource, chain: ExecutionChain, outbox: Outbox) -> Cursor:
    """Where the stream goes on; at the very first start the head, with a backfill for what lies before it (C9)."""
    if (live := await outbox.live(source.stream)) is None:
        head = await chain.head()
        await open_stream(outbox.database, source.stream, head.number, hex_text(head.hash))
        live = await outbox.live(source.stream)
    assert live is not None
    return live


async def _while_lost(work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, started over for a while when the database goes away in the middle of a start."""
    for _ in range(START_TRIES):
        try:
            return await work()
        except DatabaseUnavailable as error:
            log.warning("start_waits", problem=str(error), retry_in_s=REJOIN_PAUSE_S)
            await asyncio.sleep(REJOIN_PAUSE_S)
    return await work()


async def _dispatch(settings: Settings, store: Store, stop: asyncio.Event) -> None:
    delivery = settings.delivery
    clock = ServiceClock(await _while_lost(store.database.now))
    sender = Sender(
        Guard(url_rules(settings)),
        ca_file=delivery.ca_file,
        connect_timeout_s=delivery.connect_timeout_s,
        total_timeout_s=delivery.timeout_s,
    )
    options = DispatchOptions(
        schedule_s=delivery.schedule,
        concurrency=delivery.concurrency,
        lease_s=delivery.lease_s,
        poll_s=delivery.poll_interval_s,
        drain_s=delivery.timeout_s + 5,
        plain_header=delivery.plain_signature_header,
    )
    async with sender:
        rng = random.SystemRandom()
        await Dispatcher(store.database, sender, {store.key.id: store.key}, clock, options, rng).run(stop)


async def _keep_server(store: Store) -> None:
    """Brings the embedded server back when its supervisor was killed; any other server is its owner's business."""
    while True:
        await store.database.lost.wait()
        store.database.lost.clear()
        if store.embedded is not None:
            try:
                await asyncio.to_thread(store.embedded.join)
            except VaulteventsError as error:
                log.warning("server_not_back", problem=str(error), retry_in_s=REJOIN_PAUSE_S)
                store.database.lost.set()
        await asyncio.sleep(REJOIN_PAUSE_S)
