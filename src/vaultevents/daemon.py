"""The composition root: builds the workers, supervises them in one TaskGroup, drains."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import structlog

from vaultevents.api import scraping
from vaultevents.api.app import build
from vaultevents.api.handlers import ApiContext
from vaultevents.api.limits import AccountShares, Rate, Shares
from vaultevents.api.server import ServerOptions, bind, url_of
from vaultevents.api.server import serve as answer
from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.config import CHAIN_IDS, Settings
from vaultevents.console.app import build as build_console
from vaultevents.console.checks import Check, CheckRunner
from vaultevents.console.context import ConsoleContext
from vaultevents.core.actor import SERVICE, acting_as
from vaultevents.core.errors import ConfigError, DatabaseUnavailable, SourceUnavailable, VaulteventsError
from vaultevents.core.sealing import Secret
from vaultevents.core.tokens import TokenRules
from vaultevents.core.webhook_health import Parking
from vaultevents.dispatch.attempts import Dispatcher
from vaultevents.dispatch.lanes import DeliveryLane, DispatchOptions, ResendLane, ResendOptions
from vaultevents.dispatch.notifier import NoticeLane, OperatorWebhook
from vaultevents.dispatch.sender import Sender
from vaultevents.dispatch.signer import Signer
from vaultevents.egress import Guard
from vaultevents.store import authorized_transaction, feed, retention
from vaultevents.store.apikeys import KeyRing
from vaultevents.store.clock import ServiceClock
from vaultevents.store.flag_changes import follow_flags
from vaultevents.store.frozen_sessions import end_stalled
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.watch.streams import follow
from vaultevents.watch.wakeup import Wakeup
from vaultevents.watch.watcher import Advanced
from vaultevents.wiring.database import Store, disks, open_hash_key, open_store, service_clock, while_lost
from vaultevents.wiring.delivery import check_authority, operator_webhook, proxy, url_rules
from vaultevents.wiring.node_state import keep_node_state
from vaultevents.wiring.process_memory import tune_memory
from vaultevents.wiring.safe_block import READ_EVERY_DEVNET_S, READ_EVERY_S, SafeBlock
from vaultevents.wiring.sources import (
    AUDIT_OFF,
    head_policy,
    locator_problem,
    open_sources,
    socket_heads,
    switched_off,
)

log = structlog.get_logger("daemon")

Role = Literal["watch", "dispatch", "api"]
ROLES: tuple[Role, ...] = ("watch", "dispatch", "api")
REJOIN_PAUSE_S = 0.5
CLOCK_CHECK_S = 30.0
FORGET_S = 30.0
PRUNE_EVERY_S = 3600.0
PRUNE_PAUSE_S = 1.0
"""After each thousand deliveries, so that nothing else notices."""
METRICS_CONNECTIONS = 64
CONSOLE_CONNECTIONS = 128
OTHER_FILES = 512
"""What the database, the nodes, the metrics and the process itself may have open."""


@dataclass(frozen=True, slots=True)
class Running:
    """What a caller sees of the running service. `urls` has where `api`, `metrics` and `console` listen."""

    database: Database
    urls: Mapping[str, str]


async def serve(
    settings: Settings,
    stop: asyncio.Event,
    *,
    only: Collection[Role] = ROLES,
    on_advance: Callable[[Advanced], None] = lambda _: None,
    observed: bool = True,
    beside: Callable[[Running], Coroutine[Any, Any, None]] | None = None,
    chain_clock: ServiceClock | None = None,
    check: Check | None = None,
) -> None:
    """Runs the chosen workers until `stop` is set, then drains: attempts in flight are finished and settled.

    Metrics are served to the end of the drain, unless they are off, and not by a process that is not `observed`.
    `beside` runs beside the workers from when all of them are started, and is cancelled after the drain.
    `chain_clock` is the time of a simulated chain that is not of now. `check` is what the console offers to run.

    A span that is being read then is dropped; it is read again at the next start. A `StreamStopped` or a bug in
    one worker ends all of them.
    """
    head_policy(settings)
    check_authority(settings)
    operator = operator_webhook(settings)
    async with AsyncExitStack() as stack:
        stack.enter_context(acting_as(SERVICE))
        listener = _listener(settings, only)
        if listener is not None:
            stack.callback(listener.close)
        scraped = _monitoring_listener(settings) if observed else None
        if scraped is not None:
            stack.callback(scraped.close)
        console = bind(console_options(settings)) if observed and _has_console(settings, only) else None
        if console is not None:
            stack.callback(console.close)
        store = await stack.enter_async_context(open_store(settings))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        keepers = [group.create_task(_keep_server(store))]  # first: every later step may find the server gone
        clock = await service_clock(store.database)
        keepers.append(group.create_task(_keep_time(store.database, clock)))
        keepers.append(group.create_task(end_stalled(store.database)))
        if {"watch", "dispatch"} & set(only):
            keepers.append(group.create_task(follow_flags(store.database)))
        files = _files_allow(
            settings.delivery.concurrency if "dispatch" in only else 0,
            settings.api.max_connections if listener else 0,
        )
        drained, readiness = asyncio.Event(), scraping.Readiness(*({*only} - (set() if listener else {"api"})))
        observing = (
            group.create_task(_observe(settings, store, clock, scraped, readiness, drained)) if scraped else None
        )
        reading = clock if chain_clock is None else chain_clock
        safe = SafeBlock(READ_EVERY_S if settings.network in CHAIN_IDS else READ_EVERY_DEVNET_S)
        watching = (
            group.create_task(_watch(settings, store, reading, on_advance, readiness, safe))
            if "watch" in only
            else None
        )
        dispatching = (
            group.create_task(_dispatch(settings, store, clock, files, readiness, stop)) if "dispatch" in only else None
        )
        notifying = (
            group.create_task(_send_notices(settings, store, clock, operator, stop)) if "dispatch" in only else None
        )
        answering = (
            group.create_task(_answer(settings, store, clock, listener, files, readiness, stop)) if listener else None
        )
        urls: dict[str, str] = {}
        if listener is not None:
            urls["api"] = url_of(listener, server_options(settings, files.connections))
        if scraped is not None:
            urls["metrics"] = url_of(scraped, metrics_options(settings))
        showing: asyncio.Task[None] | None = None
        if console is not None:
            urls["console"] = url_of(console, console_options(settings))
            runner = None if check is None else CheckRunner(check, settings, lambda: clock.now().timestamp())
            context = ConsoleContext(
                store.database,
                settings,
                store.key,
                lambda: clock.now().timestamp(),
                stop,
                runner,
                safe.number,
                sources=partial(open_sources, settings, store.database, reading, without_beacon=True),
                chain_behind_s=lambda: (clock.now() - reading.now()).total_seconds(),
            )
            showing = group.create_task(_show(context, console, urls["console"]))
        if watching is not None and settings.retention.keep_days:  # one process watches, many may dispatch
            keepers.append(group.create_task(_prune(store.database, timedelta(days=settings.retention.keep_days))))
        if watching is not None:
            for setting, never in switched_off(settings).items():
                log.warning("source_off", setting=setting, never_sent=never)
            if not settings.execution.audit_blocks_per_s:
                log.warning("audit_off", advice=AUDIT_OFF)
        tune_memory()
        if beside is not None:
            keepers.append(group.create_task(beside(Running(store.database, urls))))
        log.info("started", network=settings.network, roles=sorted(only))
        await stop.wait()
        log.info("stopping")
        readiness.stopping()
        if watching is not None:
            watching.cancel()
        for draining in (dispatching, notifying, answering, showing):
            if draining is not None:
                await draining
        drained.set()
        if observing is not None:
            await observing
        for keeper in keepers:
            keeper.cancel()


async def _watch(
    settings: Settings,
    store: Store,
    clock: ServiceClock,
    on_advance: Callable[[Advanced], None],
    readiness: scraping.Readiness,
    safe: SafeBlock,
) -> None:
    async with AsyncExitStack() as stack:
        # a new context for each try: one can be entered only once
        opened = await while_lost(lambda: stack.enter_async_context(open_sources(settings, store.database, clock)))
        if opened.resolver is not None:
            await _ask_locator(settings, opened.chain)
        outbox, wakeup = Outbox(store.database), Wakeup()
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_node_state(store.database, opened.pools))
            group.create_task(safe.follow(opened.chain))
            for stream in opened.streams:
                per_s = settings.execution.audit_blocks_per_s
                group.create_task(follow(stream, outbox, on_advance, wakeup, audit_per_s=per_s))
            for heads in socket_heads(settings):
                group.create_task(heads.follow(wakeup.give))
            if opened.discovery is not None:
                group.create_task(opened.discovery.run())
            if opened.resolver is not None:
                group.create_task(opened.resolver.run())
            readiness.started("watch")


async def _ask_locator(settings: Settings, chain: ExecutionChain) -> None:
    try:
        problem = await locator_problem(settings, chain)
    except SourceUnavailable as unknown:
        problem = str(unknown)
    if problem is not None:
        log.error("oracle_address_doubtful", problem=problem)


async def _dispatch(
    settings: Settings,
    store: Store,
    clock: ServiceClock,
    files: OpenFiles,
    readiness: scraping.Readiness,
    stop: asyncio.Event,
) -> None:
    delivery = settings.delivery
    options = DispatchOptions(
        schedule_s=delivery.schedule,
        concurrency=files.attempts,
        per_webhook=delivery.per_webhook,
        per_webhook_max=delivery.per_webhook_max,
        parking=Parking(
            delivery.park_after,
            timedelta(seconds=delivery.park_first_s),
            timedelta(seconds=max(delivery.park_first_s, delivery.park_longest_s)),
        ),
        lease_s=delivery.lease_s,
        poll_s=delivery.poll_interval_s,
        drain_s=delivery.timeout_s + 5,
    )
    resending = ResendOptions(
        per_webhook=delivery.per_webhook,
        lease_s=delivery.lease_s,
        poll_s=delivery.poll_interval_s,
        drain_s=options.drain_s,
    )
    async with _sender(settings) as sender, asyncio.TaskGroup() as group:
        signer = Signer({key.id: key for key in store.key.known}, delivery.plain_signature_header)
        resends = ResendLane(store.database, signer, resending)
        group.create_task(Dispatcher(resends, sender, clock).run(stop))
        deliveries = DeliveryLane(store.database, signer, options, random.SystemRandom())
        readiness.started("dispatch")
        await Dispatcher(deliveries, sender, clock).run(stop)


async def _send_notices(
    settings: Settings,
    store: Store,
    clock: ServiceClock,
    operator: tuple[str, Secret] | None,
    stop: asyncio.Event,
) -> None:
    """Notices for the operator, over connections of their own."""
    delivery = settings.delivery
    webhook = None if operator is None else OperatorWebhook(*operator)
    options = DispatchOptions(delivery.schedule, lease_s=delivery.lease_s, drain_s=delivery.timeout_s + 5)
    notices = NoticeLane(store.database, webhook, options, random.SystemRandom())
    async with _sender(settings) as sender:
        await Dispatcher(notices, sender, clock).run(stop)


def _sender(settings: Settings) -> Sender:
    delivery = settings.delivery
    return Sender(
        Guard(url_rules(settings)),
        ca_file=delivery.ca_file,
        proxy=proxy(settings),
        connect_timeout_s=delivery.connect_timeout_s,
        total_timeout_s=delivery.timeout_s,
    )


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """How the descriptors of this process are divided: attempts in flight, and connections of the API."""

    attempts: int
    connections: int


def _files_allow(concurrency: int, connections: int) -> OpenFiles:
    """Divide the descriptors of this process; raise the limit of open files if it has to be.

    Where the hard limit is too low, the API's connections get a quarter at most, so that deliveries have theirs.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return OpenFiles(concurrency, connections)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = concurrency + connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return OpenFiles(concurrency, connections)
    files = OpenFiles(concurrency, connections)
    if hard != resource.RLIM_INFINITY and hard < needed:
        free = max(hard - OTHER_FILES, 2)
        connections = min(connections, max(free // 4, 1) if concurrency else free)
        files = OpenFiles(min(concurrency, free - connections), connections)
        log.warning(
            "few_open_files",
            limit=hard,
            concurrency=files.attempts,
            api_connections=files.connections,
            advice=f"raise the hard limit to {needed}",
        )
    else:
        hard = needed
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return files


def _listener(settings: Settings, only: Collection[Role]) -> socket.socket | None:
    """The socket of the API, bound before anything else begins; None when this process does not serve it."""
    if settings.api.serve == "on" and "api" in only:
        return bind(server_options(settings, settings.api.max_connections))
    if set(only) == {"api"}:
        raise ConfigError('api.serve is "off", so there is nothing to do with --only api: set it to "on"')
    return None


def server_options(settings: Settings, connections: int) -> ServerOptions:
    """Return where and how the API listens."""
    api = settings.api
    return ServerOptions(
        api.host,
        api.port,
        api.certificate_file,
        api.key_file,
        tuple(map(str, api.trusted_proxies)),
        max_connections=connections,
        connections_per_address=api.connections_per_address,
        answer_s=api.answer_timeout_s,
    )


async def _answer(
    settings: Settings,
    store: Store,
    clock: ServiceClock,
    listener: socket.socket,
    files: OpenFiles,
    readiness: scraping.Readiness,
    stop: asyncio.Event,
) -> None:
    """Serve the HTTP API."""
    api = settings.api
    desk = ApiContext(
        database=store.database,
        key=store.key,
        hash_key=await while_lost(lambda: open_hash_key(store)),
        url_rules=url_rules(settings),
        token_rules=TokenRules(api.nonce_max, frozenset(api.public_origins)),
        rate=Rate(api.requests_per_minute, api.burst),
        max_webhooks=api.webhooks_per_account,
        now_s=lambda: clock.now().timestamp(),
        shares=AccountShares(Shares(api.requests_at_once)),
    )
    await while_lost(lambda: feed.adopt_restored_events(store.database))
    options = server_options(settings, files.connections)
    ring = KeyRing(store.database)
    upkeep = [asyncio.create_task(work) for work in (_forget(store.database), ring.uses.keep())]
    log.info("api_listens", url=url_of(listener, options))
    readiness.started("api")
    try:
        await answer(build(desk, ring), listener, options, desk.now_s, stop)
    finally:
        for task in upkeep:
            task.cancel()
        await asyncio.gather(*upkeep, return_exceptions=True)
        await ring.uses.save()


def metrics_options(settings: Settings) -> ServerOptions:
    """Return where the metrics are served."""
    return ServerOptions(
        settings.metrics.host,
        settings.metrics.port,
        what="the metrics listener",
        table="metrics",
        max_connections=METRICS_CONNECTIONS,
    )


def _monitoring_listener(settings: Settings) -> socket.socket | None:
    """The socket of metrics and health; None where they are off, or at the default address if that is in use.

    Another process of this service on the machine has it then.
    """
    if settings.metrics.serve == "off":
        return None
    try:
        return bind(metrics_options(settings))
    except ConfigError as problem:
        if settings.metrics.model_fields_set:
            raise
        log.warning("metrics_not_served", problem=str(problem))
        return None


async def _observe(
    settings: Settings,
    store: Store,
    clock: ServiceClock,
    listener: socket.socket,
    readiness: scraping.Readiness,
    stop: asyncio.Event,
) -> None:
    """Metrics and health, for the operator's monitoring."""
    options = metrics_options(settings)
    log.info("metrics_listen", url=url_of(listener, options))
    board = scraping.build(store.database, disks(settings), readiness)
    await answer(board, listener, options, lambda: clock.now().timestamp(), stop)


def _has_console(settings: Settings, only: Collection[Role]) -> bool:
    """Whether this process serves the console: the one that serves the API, so that one of several does."""
    return settings.console.serve == "on" and "api" in only


def console_options(settings: Settings) -> ServerOptions:
    """Return where and how the console listens."""
    console = settings.console
    return ServerOptions(
        console.host,
        console.port,
        console.certificate_file,
        console.key_file,
        tuple(map(str, console.trusted_proxies)),
        what="the console",
        table="console",
        max_connections=CONSOLE_CONNECTIONS,
        connections_per_address=CONSOLE_CONNECTIONS,
    )


async def _show(context: ConsoleContext, listener: socket.socket, url: str) -> None:
    """Serve the console."""
    log.info("console_listens", url=url, advice="'vaultevents console' prints a link to log in")
    options = console_options(context.settings)
    try:
        await answer(build_console(context), listener, options, context.now_s, context.stop)
    finally:
        if context.check is not None:
            await context.check.close()


async def _forget(database: Database) -> None:
    """Removes what the API need not remember any longer."""
    while True:
        with contextlib.suppress(DatabaseUnavailable):
            await authorized_transaction.forget(database)
        await asyncio.sleep(FORGET_S)


async def _prune(database: Database, older_than: timedelta) -> None:
    """Removes old finished deliveries, slowly."""
    while True:
        with contextlib.suppress(DatabaseUnavailable):
            pruned = await retention.prune(database, older_than, pause_s=PRUNE_PAUSE_S)
            if pruned != retention.Pruned():
                log.info("pruned", deliveries=pruned.deliveries, attempts=pruned.attempts, resends=pruned.resends)
        await asyncio.sleep(PRUNE_EVERY_S)


async def _keep_time(database: Database, clock: ServiceClock) -> None:
    while True:
        await asyncio.sleep(CLOCK_CHECK_S)
        with contextlib.suppress(DatabaseUnavailable):
            clock.check(await database.now())


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
