"""The nodes and gateways that the settings name, of the right network (rule E10), and the streams over them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from vaultevents.chain.beacon.client import BeaconChain, BeaconIdentity, BeaconOptions
from vaultevents.chain.execution.anchoring import BeaconAnchor
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy, Identity, Reverted
from vaultevents.chain.execution.contracts import ContractMismatch, call
from vaultevents.chain.execution.head_subscription import NewHeads
from vaultevents.chain.ipfs import IpfsClient
from vaultevents.chain.upstream.redaction import node_name
from vaultevents.config import CHAIN_IDS, Settings
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import ConfigError, InputError, SourceUnavailable, VaulteventsError, WrongNetwork
from vaultevents.core.events import EVENT_TYPES, ReportUpdateAvailable
from vaultevents.core.nodes import Upstream
from vaultevents.core.trust import guarantee
from vaultevents.core.units import checksum
from vaultevents.egress import Guard
from vaultevents.store import nodes
from vaultevents.store.clock import ServiceClock
from vaultevents.store.cursors import EPOCH_STREAMS
from vaultevents.store.network import pin, pin_beacon, pinned, pinned_beacon
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.watch.background_audit import PUBLIC_BLOCKS
from vaultevents.watch.deposits import DepositOptions
from vaultevents.watch.discovery import Discovery
from vaultevents.watch.reports import Resolver
from vaultevents.watch.streams import Steps, Stream, logs_stream, reports_stream, staking_streams
from vaultevents.wiring.delivery import url_rules
from vaultevents.wiring.node_state import Pool

AUDIT_OFF = (
    "execution.audit_blocks_per_s is 0: what backfills read is read again by nobody, so prove it with "
    "'vaultevents audit chain'"
)
EPOCH_EVENT_TYPES = tuple(name for name in EVENT_TYPES if name.startswith("validator_"))
FIRST_VAULTS_S = {"mainnet": 1_759_276_800}  # 2025-10-01; the contracts of vaults were deployed in December 2025


@asynccontextmanager
async def open_chain(
    settings: Settings, database: Database, *, head: HeadPolicy | None = None
) -> AsyncIterator[ExecutionChain]:
    """The execution nodes, after the first contact has shown that they are of the right network (rule E10)."""
    if not settings.execution.urls:
        raise ConfigError(
            "execution.urls is empty: name the URL of your execution node there or in VAULTEVENTS_EXECUTION__URLS"
        )
    async with unpinned_chain(settings, settings.execution.urls, head=head) as chain:
        chain.load_state(await nodes.load_node_states(database, "execution"))
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


def unpinned_chain(settings: Settings, urls: Sequence[SecretStr], *, head: HeadPolicy | None = None) -> ExecutionChain:
    """Make the chain at these execution nodes, of whichever network they are."""
    execution = settings.execution
    options = ExecutionOptions(
        headers=execution.headers,
        ask=execution.ask,
        completeness=execution.completeness,
        blooms_per_day=execution.blooms_per_day,
        strict=settings.network in CHAIN_IDS,
        answer_limit_bytes=execution.max_answer_mb * 2**20,
        receipt_limit_bytes=execution.max_receipt_mb * 2**20,
        batch_size=execution.batch_size,
        log_range_max=execution.max_range_blocks,
        total_timeout_s=execution.timeout_s,
    )
    return ExecutionChain([url.get_secret_value() for url in urls], head=head or head_policy(settings), options=options)


def unpinned_beacon(settings: Settings, urls: Sequence[SecretStr], clock: Callable[[], float]) -> BeaconChain:
    """Make the beacon chain at these nodes, of whichever network they are."""
    options = BeaconOptions(
        ssz=settings.beacon.scan == "ssz",
        strict=settings.network in CHAIN_IDS,
        total_timeout_s=settings.beacon.timeout_s,
    )
    return BeaconChain([url.get_secret_value() for url in urls], options, clock=clock)


def with_node_alone(settings: Settings, url: SecretStr | None) -> Settings:
    """The settings with this execution node and no other; None: without any."""
    alone = settings.execution.model_copy(update={"urls": () if url is None else (url,)})
    return settings.model_copy(update={"execution": alone})


@asynccontextmanager
async def open_beacon(
    settings: Settings, database: Database, clock: ServiceClock
) -> AsyncIterator[tuple[BeaconChain, ChainTime]]:
    """The beacon nodes and their time, after the first contact has shown that their network is the pinned one."""
    async with unpinned_beacon(settings, settings.beacon.urls, lambda: clock.now().timestamp()) as beacon:
        beacon.load_state(await nodes.load_node_states(database, "beacon"))
        if (known := await pinned_beacon(database)) is not None:
            beacon.expect(BeaconIdentity(*known))
        identity = await beacon.identity()
        await pin_beacon(database, identity.genesis_validators_root, identity.time)
        beacon.expect(identity)
        yield beacon, identity.time


@dataclass(frozen=True, slots=True)
class Sources:
    """What can be read with these settings. What is not configured is None, and its streams are not there (rule C11).

    `unopened` has the streams that are configured and could not be opened, with the reason.
    """

    chain: ExecutionChain
    streams: tuple[Stream, ...]
    discovery: Discovery | None
    time: ChainTime | None
    resolver: Resolver | None
    pools: Mapping[Upstream, Pool]
    unopened: Mapping[str, VaulteventsError] = field(default_factory=dict)


@asynccontextmanager
async def open_sources(
    settings: Settings, database: Database, clock: ServiceClock, *, without_beacon: bool = False
) -> AsyncIterator[Sources]:
    """Every stream that is configured, live and replay alike.

    With `without_beacon` a beacon node that cannot be used leaves out its streams instead of raising; the time of its
    chain is then the one that the database is pinned to, if it is.
    """
    async with AsyncExitStack() as stack:
        chain = await stack.enter_async_context(open_chain(settings, database))
        pools: dict[Upstream, Pool] = {"execution": chain}
        poll_s = settings.execution.poll_interval_s
        streams = [logs_stream(chain, _steps(settings, poll_s))]
        resolver = discovery = time = None
        unopened: dict[str, VaulteventsError] = {}
        if oracles := settings.watched_oracles:
            files = await stack.enter_async_context(open_files(settings))
            files.load_state(await nodes.load_node_states(database, "ipfs"))
            pools["ipfs"] = files
            simulation = chain if settings.reports.simulate == "on" else None
            resolver = Resolver(Outbox(database), files, settings.reports.poll_interval_s, simulation)
            streams.append(reports_stream(chain, oracles, _steps(settings, settings.reports.poll_interval_s)))
        if settings.beacon.urls:
            try:
                beacon, time = await stack.enter_async_context(open_beacon(settings, database, clock))
            except (SourceUnavailable, WrongNetwork) as error:
                if not without_beacon:
                    raise
                unopened = dict.fromkeys(EPOCH_STREAMS, error)
                time = None if (known := await pinned_beacon(database)) is None else known[1]
            else:
                pools["beacon"] = beacon
                chain.anchor = BeaconAnchor(beacon, time)
                if settings.network in CHAIN_IDS:
                    chain.expect_finality(time, lambda: clock.now().timestamp())
                poll_s = settings.beacon.poll_interval_s
                discovery = Discovery(
                    beacon,
                    chain,
                    database,
                    time,
                    poll_s,
                    find_by=settings.beacon.validators,
                    deposits=_deposit_options(settings),
                )
                streams += staking_streams(chain, beacon, database, discovery, time, clock.now_s, poll_s=poll_s)
        yield Sources(chain, tuple(streams), discovery, time, resolver, pools, unopened)


def setting_of(settings: Settings, error: SourceUnavailable) -> str | None:
    """Return the setting that names a node of which the error speaks; None where it speaks of no node by its name."""
    for setting, urls in (
        ("beacon.urls", settings.beacon.urls),
        ("reports.gateways", settings.reports.gateways),
        ("execution.urls", settings.execution.urls),
    ):
        names = [node_name(url.get_secret_value().removeprefix("kubo+")) for url in urls]
        if any(name in str(error) for name in names):
            return setting
    return None


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


def guarantee_of(settings: Settings) -> str:
    """What these settings guarantee about the events of contracts (docs/trust.md)."""
    execution = settings.execution
    return guarantee(
        len(execution.urls),
        anchored=bool(settings.beacon.urls),
        completeness=execution.completeness,
        every_header=execution.headers == "every" or execution.completeness == "receipts",
        final=head_policy(settings).tag == "finalized",
    )


async def locator_problem(settings: Settings, chain: ExecutionChain) -> str | None:
    """Why the oracle that the protocol names now is not one of the configured ones; None when it is, or is not known.

    `lazyOracle()` of the LidoLocator. A disagreement is reported and changes nothing: what is configured decides, so
    that a replay over an upgrade stays the same (rule C6).
    """
    contracts = settings.contracts
    if contracts.lido_locator is None or not contracts.lazy_oracles:
        return None
    try:
        answer = await call(chain, contracts.lido_locator, "LidoLocator", "lazyOracle")
    except ContractMismatch as mismatch:
        return f"the contract at contracts.lido_locator is not a LidoLocator: {mismatch}"
    if isinstance(answer, Reverted):
        return (
            f"the contract at contracts.lido_locator ({checksum(contracts.lido_locator)}) is not a LidoLocator: "
            "it has no function lazyOracle()"
        )
    (named,) = answer
    if named in contracts.lazy_oracles:
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


def _steps(settings: Settings, poll_s: float) -> Steps:
    """Where few headers are read, as many blocks are committed at once as their logs are asked for at once."""
    execution = settings.execution
    longest = max(execution.span_blocks, execution.max_range_blocks)
    backfill_step = longest if execution.headers == "edges" else execution.span_blocks
    audit_step = PUBLIC_BLOCKS if settings.network in CHAIN_IDS else 1
    return Steps(execution.span_blocks, backfill_step, poll_s, audit_step)


def _deposit_options(settings: Settings) -> DepositOptions:
    since_s = FIRST_VAULTS_S.get(settings.network)
    return DepositOptions(settings.beacon.deposits_from_block, since_s, settings.execution.max_range_blocks)


def head_policy(settings: Settings) -> HeadPolicy:
    """Up to which block is read (rule C1)."""
    try:
        return HeadPolicy.parse(settings.execution.head)
    except InputError as error:
        raise ConfigError(f"execution.head: {error}") from None
