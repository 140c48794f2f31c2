"""Opens what the settings name: the database with its key, the nodes, the gateways, and the streams over them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from vaultevents.chain.beacon import BeaconChain, BeaconIdentity, BeaconOptions
from vaultevents.chain.execution import ExecutionChain, ExecutionOptions, HeadPolicy, Identity, Reverted
from vaultevents.chain.ipfs import IpfsClient
from vaultevents.config import Settings
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import ConfigError, DatabaseUnavailable, DatabaseUnusable, InputError, WrongNetwork
from vaultevents.core.events import EVENT_TYPES, ReportUpdateAvailable
from vaultevents.core.sealing import KEY_BYTES, NONCE_BYTES, HashKey, MasterKey, parse_master_key
from vaultevents.core.units import Address, checksum
from vaultevents.core.webhooks import UrlRules
from vaultevents.egress import Guard
from vaultevents.store.apikeys import hash_key
from vaultevents.store.clock import ServiceClock
from vaultevents.store.embedded import EmbeddedPostgres
from vaultevents.store.network import pin, pin_beacon, pinned, pinned_beacon
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database, open_database
from vaultevents.store.webhooks import sealed_key_ids
from vaultevents.watch.discovery import Discovery
from vaultevents.watch.reports import Resolver
from vaultevents.watch.streams import Stream, logs_stream, reports_stream, staking_streams

log = structlog.get_logger("daemon")

T = TypeVar("T")
EPOCH_EVENT_TYPES = tuple(name for name in EVENT_TYPES if name.startswith("validator_"))
PAUSE_S = 0.5
START_TRIES = 20
LAZY_ORACLE_SELECTOR = bytes.fromhex("2e39045c")  # lazyOracle()


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
            database = await while_lost(partial(_open_embedded, embedded, settings.database_schema))
        stack.push_async_callback(database.close)
        in_use = await while_lost(partial(_key_ids_in_use, database, embedded))
        yield Store(database, _master_key(settings, in_use), embedded)


async def _open_embedded(embedded: EmbeddedPostgres, schema: str) -> Database:
    address = await asyncio.to_thread(embedded.join)
    return await open_database(address.connect_kwargs(), schema=schema)


async def _key_ids_in_use(database: Database, embedded: EmbeddedPostgres | None) -> set[str]:
    if embedded is not None:
        await asyncio.to_thread(embedded.join)  # nobody else brings it back while a start waits for it
    return await sealed_key_ids(database)


def _master_key(settings: Settings, in_use: Collection[str]) -> MasterKey:
    """From the environment or a file; the embedded database gets a key file of its own (D2).

    `in_use` are the ids of the keys that the stored secrets are sealed with: no other will do, nor a new one.
    """
    key = _given_key(settings, make=not in_use)
    if other := sorted(set(in_use) - {key.id}):
        raise DatabaseUnusable(
            f"secrets in this database are sealed with the master key {', '.join(other)}, and the one given is "
            f"{key.id}: give the right one"
        )
    return key


def _given_key(settings: Settings, *, make: bool) -> MasterKey:
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
        if make and not path.exists():
            _write_key(path)
    try:
        return parse_master_key(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        advice = "make one with 'openssl rand -base64 32', mode 0600" if make else "restore it from its copy"
        raise ConfigError(f"the master key file {path} is missing: {advice}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the master key file {path} ({error.strerror}): make it readable") from None
    except (ConfigError, UnicodeDecodeError):
        raise ConfigError(f"{path} holds no master key: restore it from its copy") from None


def _write_key(path: Path) -> None:
    """Whole or not at all, on the disk before anything is sealed with it, and never over one that was just written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(name, path)
                log.info("master_key_made", path=str(path))
        finally:
            Path(name).unlink()
        _sync(path.parent)
    except OSError as error:
        raise ConfigError(
            f"cannot write the master key file {path} ({error.strerror}): mend that, or choose another data_dir"
        ) from None


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    async with ExecutionChain(urls, head=head or head_policy(settings), options=options) as chain:
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


@asynccontextmanager
async def open_beacon(
    settings: Settings, database: Database, clock: ServiceClock
) -> AsyncIterator[tuple[BeaconChain, ChainTime]]:
    """The beacon nodes, after the first contact has shown that they are of the right network (E10), and its time."""
    urls = [url.get_secret_value() for url in settings.beacon.urls]
    options = BeaconOptions(ssz=settings.beacon.scan == "ssz", total_timeout_s=settings.beacon.timeout_s)
    async with BeaconChain(urls, options, clock=lambda: clock.now().timestamp()) as beacon:
        if (known := await pinned_beacon(database)) is not None:
            beacon.expect(BeaconIdentity(*known))
        identity = await beacon.identity()
        await pin_beacon(database, identity.genesis_validators_root, identity.time)
        beacon.expect(identity)
        yield beacon, identity.time


@dataclass(frozen=True, slots=True)
class Sources:
    """What can be read with these settings. What is not configured is None, and its streams are not there (C11)."""

    chain: ExecutionChain
    streams: tuple[Stream, ...]
    discovery: Discovery | None
    time: ChainTime | None
    resolver: Resolver | None


@asynccontextmanager
async def open_sources(settings: Settings, database: Database, clock: ServiceClock) -> AsyncIterator[Sources]:
    """Every stream that is configured, live and replay alike."""
    async with AsyncExitStack() as stack:
        chain = await stack.enter_async_context(open_chain(settings, database))
        step, poll_s = settings.execution.span_blocks, settings.execution.poll_interval_s
        streams = [logs_stream(chain, step=step, poll_s=poll_s)]
        resolver = discovery = time = None
        if settings.reports.gateways and settings.contracts.lazy_oracles:
            files = await stack.enter_async_context(open_files(settings))
            simulation = chain if settings.reports.simulate == "on" else None
            resolver = Resolver(Outbox(database), files, settings.reports.poll_interval_s, simulation)
            oracles = settings.contracts.lazy_oracles
            streams.append(reports_stream(chain, oracles, step=step, poll_s=settings.reports.poll_interval_s))
        if settings.beacon.urls:
            beacon, time = await stack.enter_async_context(open_beacon(settings, database, clock))
            beacon_poll_s = settings.beacon.poll_interval_s
            discovery = Discovery(beacon, chain, database, time, beacon_poll_s)
            streams += staking_streams(chain, beacon, database, discovery, time, clock.now_s, poll_s=beacon_poll_s)
        yield Sources(chain, tuple(streams), discovery, time, resolver)


def switched_off(settings: Settings) -> dict[str, tuple[str, ...]]:
    """What is not configured, by the setting that is missing, and the event types that will therefore never come."""
    off: dict[str, tuple[str, ...]] = {}
    if not settings.beacon.urls:
        off["beacon.urls"] = EPOCH_EVENT_TYPES
    if not settings.reports.gateways:
        off["reports.gateways"] = (ReportUpdateAvailable.event_type,)
    elif not settings.contracts.lazy_oracles:
        off["contracts.lazy_oracles"] = (ReportUpdateAvailable.event_type,)
    return off


async def locator_problem(settings: Settings, chain: ExecutionChain) -> str | None:
    """Why the oracle that the protocol names now is not one of the configured ones; None when it is, or cannot be told.

    `lazyOracle()` of the LidoLocator. A disagreement is told loudly and changes nothing: what is configured decides, so
    that a replay over an upgrade stays the same (C6).
    """
    contracts = settings.contracts
    if contracts.lido_locator is None or not contracts.lazy_oracles:
        return None
    answer = await chain.call(contracts.lido_locator, LAZY_ORACLE_SELECTOR)
    if isinstance(answer, Reverted) or len(answer) != 32:
        return f"the contract at contracts.lido_locator ({checksum(contracts.lido_locator)}) is not a LidoLocator"
    if (named := Address(answer[12:])) in contracts.lazy_oracles:
        return None
    return (
        f"the protocol publishes its reports through {checksum(named)} now, which is not in contracts.lazy_oracles: "
        "add it, and keep the old one so that replays stay the same"
    )


def report_cache(settings: Settings) -> Path:
    """Where verified files of reports are kept, so that a replay needs no network."""
    return settings.directory / "reports"


def open_files(settings: Settings) -> IpfsClient:
    """The files of reports: from the cache, or from a gateway that has them."""
    urls = [url.get_secret_value() for url in settings.reports.gateways]
    return IpfsClient(urls, guard=Guard(url_rules(settings)), cache_dir=report_cache(settings))


def head_policy(settings: Settings) -> HeadPolicy:
    """Up to which block is read (C1)."""
    try:
        return HeadPolicy.parse(settings.execution.head)
    except InputError as error:
        raise ConfigError(f"execution.head: {error}") from None


def check_authority(settings: Settings) -> None:
    """Raises `ConfigError` when `delivery.ca_file` is not what receivers' certificates can be verified with."""
    path = settings.delivery.ca_file
    if path is not None:
        try:
            ssl.create_default_context(cafile=path)
        except OSError as error:  # SSLError is one
            why = "it holds no PEM certificate" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(
                f"delivery.ca_file {path} cannot be used ({why}): name the certificate of the receivers' authority"
            ) from None


def url_rules(settings: Settings) -> UrlRules:
    """Which URLs webhooks may have, by the operator's settings (D10)."""
    return UrlRules(settings.delivery.ports, settings.delivery.allow, settings.delivery.deny)


async def open_hash_key(store: Store) -> HashKey:
    """The key under which API keys are hashed; made at first use (A14)."""
    return await hash_key(store.database, store.key, secrets.token_bytes(KEY_BYTES), secrets.token_bytes(NONCE_BYTES))


async def service_clock(database: Database) -> ServiceClock:
    """The clock of this process, set by the database's (D15)."""
    return ServiceClock(await while_lost(database.now))


async def while_lost(work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, started over for a while when the database goes away in the middle of a start."""
    for _ in range(START_TRIES):
        try:
            return await work()
        except DatabaseUnavailable as error:
            log.warning("start_waits", problem=str(error), retry_in_s=PAUSE_S)
            await asyncio.sleep(PAUSE_S)
    return await work()
