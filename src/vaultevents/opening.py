"""Opens what the settings name: the database with its key, the nodes, the gateways, and the streams over them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog

from vaultevents.chain.beacon import BeaconChain, BeaconIdentity, BeaconOptions
from vaultevents.chain.execution import ExecutionChain, ExecutionOptions, HeadPolicy, Identity, Reverted
from vaultevents.chain.ipfs import IpfsClient
from vaultevents.chain.newheads import NewHeads
from vaultevents.config import NEW_KEY_VARIABLE, Settings
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import ConfigError, DatabaseUnavailable, DatabaseUnusable, InputError, WrongNetwork
from vaultevents.core.events import EVENT_TYPES, ReportUpdateAvailable
from vaultevents.core.nodes import UPSTREAMS, NodeMemory, Upstream
from vaultevents.core.sealing import KEY_BYTES, NONCE_BYTES, HashKey, MasterKey, Secret, parse_master_key
from vaultevents.core.signing import check_secret
from vaultevents.core.units import Address, checksum
from vaultevents.core.webhooks import UrlRules, check_url
from vaultevents.egress import Guard
from vaultevents.store import nodes
from vaultevents.store.apikeys import hash_key
from vaultevents.store.clock import ServiceClock
from vaultevents.store.embedded import EmbeddedPostgres
from vaultevents.store.network import pin, pin_beacon, pinned, pinned_beacon
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database, open_database
from vaultevents.store.rotation import rotating_from, sealed_key_ids, sealing_with
from vaultevents.watch.discovery import Discovery
from vaultevents.watch.reports import Resolver
from vaultevents.watch.streams import Pace, Stream, logs_stream, reports_stream, staking_streams

AUDIT_OFF = (
    "execution.audit_blocks_per_s is 0: what backfills read is read again by nobody, so prove it with "
    "'vaultevents audit chain'"
)
log = structlog.get_logger("daemon")

T = TypeVar("T")
EPOCH_EVENT_TYPES = tuple(name for name in EVENT_TYPES if name.startswith("validator_"))
PAUSE_S = 0.5
START_TRIES = 20
KEEP_NODES_S = 5.0
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
    async with _opened(settings) as opened, AsyncExitStack() as stack:
        key = _given_key(settings, make=not await while_lost(opened.key_ids))

        async def hold() -> None:
            await opened.join()
            await stack.enter_async_context(sealing_with(opened.target, settings.database_schema, key.id))

        await while_lost(hold)
        _check_key(key, await while_lost(opened.key_ids))  # again: from now on nobody rotates it away
        yield Store(opened.database, key, opened.embedded)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The open database, and the key with which everything is to be sealed; its previous ones open what is there.

    `former` is the file with the former key, where this service made it: to be put away when all is done.
    """

    database: Database
    key: MasterKey
    former: Path | None


@asynccontextmanager
async def open_rotation(
    settings: Settings, new_key: Callable[[MasterKey], MasterKey] | None
) -> AsyncIterator[Rotation]:
    """Opens the database for another master key, with which nobody else seals any longer by a former one (D2).

    `new_key` makes it of the one of the settings, which is then its previous one. Without it the settings have the new
    one and its previous one already, or the key file of the embedded database is replaced; the former is kept as
    `.old` beside it. Raises `ConfigError` without either, `DatabaseUnusable` while a process seals with a former key.
    """
    async with _opened(settings) as opened:
        in_use = await while_lost(opened.key_ids)
        given = _given_key(settings, make=not in_use)
        key = given if new_key is None else new_key(given)
        _check_key(key, in_use)
        made = new_key is None and len(given.known) == 1
        if made and not _owns_key_file(settings):
            raise ConfigError(
                "there is no new master key: name its file with --new-key-file ('openssl rand -base64 32' makes one), "
                f"or set {NEW_KEY_VARIABLE}"
            )
        former = {one.id for one in key.known} - (set() if made else {key.id})
        async with rotating_from(opened.target, settings.database_schema, former):
            if made:
                if _given_key(settings, make=False).id != given.id:
                    raise DatabaseUnusable("the master key was just rotated by somebody else: start again for another")
                _renew_key(_own_key_file(settings))
                key = _given_key(settings, make=False)
            file = _former_key_file(settings)
            yield Rotation(opened.database, key, file if new_key is None and _has_former_key_file(settings) else None)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A database before its key is known; `target` is what `asyncpg.connect` takes."""

    database: Database
    target: Mapping[str, Any]
    embedded: EmbeddedPostgres | None

    async def join(self) -> None:
        """Nobody else brings the embedded server back while a start waits for it."""
        if self.embedded is not None:
            await asyncio.to_thread(self.embedded.join)

    async def key_ids(self) -> set[str]:
        """The ids of the keys that the stored secrets are sealed with."""
        await self.join()
        return await sealed_key_ids(self.database)


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[_Opened]:
    async with AsyncExitStack() as stack:
        if settings.database_url is not None:
            target = {"dsn": settings.database_url.get_secret_value()}
            opened = _Opened(await open_database(target, schema=settings.database_schema), target, None)
        else:
            embedded = EmbeddedPostgres(settings.directory / "postgres")
            stack.push_async_callback(asyncio.to_thread, embedded.leave)
            opened = await while_lost(partial(_open_embedded, embedded, settings.database_schema))
        stack.push_async_callback(opened.database.close)
        yield opened


async def _open_embedded(embedded: EmbeddedPostgres, schema: str) -> _Opened:
    target = (await asyncio.to_thread(embedded.join)).connect_kwargs()
    return _Opened(await open_database(target, schema=schema), dict(target), embedded)


def _check_key(key: MasterKey, in_use: Collection[str]) -> None:
    """`in_use` are the ids of the keys that the stored secrets are sealed with: no other will do (D2)."""
    if other := sorted(set(in_use) - {one.id for one in key.known}):
        raise DatabaseUnusable(
            f"secrets in this database are sealed with the master key {', '.join(other)}, and the one given is "
            f"{key.id}: give the right one"
        )


def _given_key(settings: Settings, *, make: bool) -> MasterKey:
    """From the environment or a file; the embedded database gets a key file of its own, if one may be made (D2)."""
    if settings.master_key is not None:
        return _after(_previous_key(settings), partial(parse_master_key, settings.master_key.get_secret_value()))
    path = settings.master_key_file
    if path is None:
        if settings.database_url is not None:
            raise ConfigError(
                "database_url needs a master key, with which webhook secrets are sealed: set VAULTEVENTS_MASTER_KEY "
                "or master_key_file to 32 bytes in base64 ('openssl rand -base64 32'), and keep a copy"
            )
        path = _own_key_file(settings)
        if make and not path.exists():
            _write_key(path, os.link)
    advice = "make one with 'openssl rand -base64 32', mode 0600" if make else "restore it from its copy"
    return _after(_previous_key(settings), partial(read_key_file, path, advice=advice))


def _after(previous: MasterKey | None, parse: Callable[[MasterKey | None], MasterKey]) -> MasterKey:
    """The key that knows its previous one; nothing precedes itself."""
    key = parse(previous)
    return parse(None) if previous is not None and previous.id == key.id else key


def _previous_key(settings: Settings) -> MasterKey | None:
    """The former key, while keys are rotated."""
    if settings.master_key_previous is not None:
        return parse_master_key(settings.master_key_previous.get_secret_value())
    path = settings.master_key_previous_file
    if path is None and _has_former_key_file(settings):
        path = _former_key_file(settings)
    return None if path is None else read_key_file(path, advice="remove the setting that names it, or restore it")


def _owns_key_file(settings: Settings) -> bool:
    """Whether the key is in a file that this service made beside the embedded database."""
    return all(given is None for given in (settings.master_key, settings.master_key_file, settings.database_url))


def _own_key_file(settings: Settings) -> Path:
    return settings.directory / "master.key"


def _former_key_file(settings: Settings) -> Path:
    return settings.directory / "master.key.old"


def _has_former_key_file(settings: Settings) -> bool:
    """Whether that key file is being replaced."""
    return _owns_key_file(settings) and _former_key_file(settings).exists()


def read_key_file(path: Path, previous: MasterKey | None = None, *, advice: str) -> MasterKey:
    """The master key in a file; `advice` is what to do where there is none. Raises `ConfigError`, which quotes none."""
    try:
        return parse_master_key(path.read_text(encoding="ascii"), previous)
    except FileNotFoundError:
        raise ConfigError(f"the master key file {path} is missing: {advice}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the master key file {path} ({error.strerror}): make it readable") from None
    except (ConfigError, UnicodeDecodeError):
        raise ConfigError(f"{path} holds no master key: restore it from its copy") from None


def _renew_key(path: Path) -> None:
    """Another key in the place of this one, which is kept as `.old`: there is no moment without both of them."""
    former = path.with_name(f"{path.name}.old")
    try:
        with contextlib.suppress(FileExistsError):  # the same key: this was ended here before
            os.link(path, former)
        _sync(path.parent)
    except OSError as error:
        raise ConfigError(f"cannot keep the former key as {former} ({error.strerror}): mend that") from None
    _write_key(path, os.replace)


def put_away_former_key(path: Path) -> Path:
    """Names the file of a key with which nothing is sealed any longer by its id: only backups still need it (D2)."""
    kept = path.with_suffix(f".{read_key_file(path, advice='it is put away already').id}")
    try:
        path.replace(kept)
        _sync(path.parent)
    except OSError as error:
        raise ConfigError(f"all is sealed with the new key, but {path} stays ({error.strerror}): move it") from None
    return kept


def _write_key(path: Path, put: Callable[[str, Path], None]) -> None:
    """A new key, whole or not at all, on the disk before anything is sealed with it.

    `put` brings the written file to its place: `os.link` never over one that was just written, `os.replace` always.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                put(name, path)
                log.info("master_key_made", path=str(path))
        finally:
            Path(name).unlink(missing_ok=True)
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
        agreement=settings.execution.agreement,
        batch_size=settings.execution.batch_size,
        log_range_max=settings.execution.max_range_blocks,
        total_timeout_s=settings.execution.timeout_s,
    )
    urls = [url.get_secret_value() for url in settings.execution.urls]
    async with ExecutionChain(urls, head=head or head_policy(settings), options=options) as chain:
        chain.recall(await nodes.recalled(database, "execution"))
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
        beacon.recall(await nodes.recalled(database, "beacon"))
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
    pools: Mapping[Upstream, Pool]


class Pool(Protocol):
    """The nodes of one upstream."""

    def memories(self) -> list[NodeMemory]: ...


@asynccontextmanager
async def open_sources(settings: Settings, database: Database, clock: ServiceClock) -> AsyncIterator[Sources]:
    """Every stream that is configured, live and replay alike."""
    async with AsyncExitStack() as stack:
        chain = await stack.enter_async_context(open_chain(settings, database))
        pools: dict[Upstream, Pool] = {"execution": chain}
        poll_s = settings.execution.poll_interval_s
        streams = [logs_stream(chain, _pace(settings, poll_s))]
        resolver = discovery = time = None
        if settings.reports.gateways and settings.contracts.lazy_oracles:
            files = await stack.enter_async_context(open_files(settings))
            files.recall(await nodes.recalled(database, "ipfs"))
            pools["ipfs"] = files
            simulation = chain if settings.reports.simulate == "on" else None
            resolver = Resolver(Outbox(database), files, settings.reports.poll_interval_s, simulation)
            oracles = settings.contracts.lazy_oracles
            streams.append(reports_stream(chain, oracles, _pace(settings, settings.reports.poll_interval_s)))
        if settings.beacon.urls:
            beacon, time = await stack.enter_async_context(open_beacon(settings, database, clock))
            pools["beacon"] = beacon
            beacon_poll_s = settings.beacon.poll_interval_s
            discovery = Discovery(beacon, chain, database, time, beacon_poll_s)
            streams += staking_streams(chain, beacon, database, discovery, time, clock.now_s, poll_s=beacon_poll_s)
        yield Sources(chain, tuple(streams), discovery, time, resolver, pools)


async def keep_nodes(database: Database, pools: Mapping[Upstream, Pool]) -> None:
    """Tells the database what changes about the nodes, every few seconds and when it is cancelled."""
    told: dict[Upstream, list[NodeMemory]] = {}

    async def tell() -> None:
        for upstream in UPSTREAMS:
            memories = pools[upstream].memories() if upstream in pools else []
            lasting = [_lasting(memory) for memory in memories]
            if told.get(upstream) != lasting:
                await nodes.remember(database, upstream, memories)
                told[upstream] = lasting

    try:
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                await tell()
            await asyncio.sleep(KEEP_NODES_S)
    finally:
        with contextlib.suppress(DatabaseUnavailable, TimeoutError):
            async with asyncio.timeout(KEEP_NODES_S):
                await tell()


@asynccontextmanager
async def keeping_limits(database: Database, pools: Mapping[Upstream, Pool]) -> AsyncIterator[None]:
    """Keeps at the end what was learned of the nodes' limits, beside the process that watches."""
    try:
        yield
    finally:
        with contextlib.suppress(DatabaseUnavailable):
            for upstream, pool in pools.items():
                await nodes.remember_limits(database, upstream, pool.memories())


def _lasting(memory: NodeMemory) -> NodeMemory:
    """What is worth writing: not that time goes by, nor every small step of a rate."""
    rate = memory.requests_per_s
    return replace(memory, since_s=0.0, requests_per_s=None if rate is None else float(f"{rate:.1g}"))


def socket_heads(settings: Settings) -> list[NewHeads]:
    """The nodes that announce new heads, as a hint to look sooner."""
    return [NewHeads(url.get_secret_value()) for url in settings.execution.websocket_urls]


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


def _pace(settings: Settings, poll_s: float) -> Pace:
    execution = settings.execution
    sparse = execution.headers == "edges"
    return Pace(execution.span_blocks, execution.max_range_blocks if sparse else execution.span_blocks, poll_s)


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


def operator_webhook(settings: Settings) -> tuple[str, Secret] | None:
    """Where notices are posted, and the secret that signs them; raises `ConfigError` for one without the other."""
    url, path = settings.operator.webhook_url, settings.operator_secret_file
    if url is None:
        return None
    if settings.operator_secret is None and path is None:
        raise ConfigError(
            "operator.webhook_url needs a secret that signs what is posted there: set VAULTEVENTS_OPERATOR_SECRET or "
            "operator_secret_file to whsec_ and 32 random bytes in base64 ('openssl rand -base64 32')"
        )
    try:
        checked = check_url(url.get_secret_value(), url_rules(settings))
    except InputError as error:
        raise ConfigError(f"operator.webhook_url: {error}") from None
    try:
        if settings.operator_secret is not None:
            return checked, Secret(check_secret(settings.operator_secret.get_secret_value()))
        assert path is not None
        return checked, Secret(check_secret(path.read_text(encoding="ascii")))
    except OSError as error:
        raise ConfigError(f"cannot read operator_secret_file {path} ({error.strerror}): make it readable") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} holds no secret: write whsec_ and 32 random bytes in base64 into it") from None
    except ConfigError as problem:
        raise ConfigError(f"the operator's secret is not usable: {problem}") from None


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
