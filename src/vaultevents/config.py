"""Settings: the TOML file, overridden by the environment. Parsed once, then frozen."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_args
from urllib.parse import urlsplit

import platformdirs
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from vaultevents.core.environment import CALL_KEY_VARIABLE, CALL_URL_VARIABLE, ENV_FILE, ENV_PREFIX, NEW_KEY_VARIABLE
from vaultevents.core.errors import ConfigError, VaulteventsError
from vaultevents.core.networks import PUBLIC_NETWORKS
from vaultevents.core.proxies import parse_proxy
from vaultevents.core.retries import SCHEDULE_S, parse_schedule
from vaultevents.core.signing import check_plain_header
from vaultevents.core.tokens import parse_origin
from vaultevents.core.units import Address, parse_address
from vaultevents.core.webhooks import DEFAULT_PORTS, AllowRule, parse_allow, parse_network
from vaultevents.core.webhooks import Network as IPNetwork

DEFAULT_FILE = Path("vaultevents.toml")

Network: TypeAlias = Literal["devnet", "hoodi", "mainnet"]
NETWORKS: tuple[Network, ...] = get_args(Network)
CHAIN_IDS = {network.name: network.chain_id for network in PUBLIC_NETWORKS}
"""Chain ids of public networks; a devnet may have any."""
PATHS = (
    "data_dir",
    "master_key_file",
    "master_key_previous_file",
    "operator_secret_file",
    "delivery.ca_file",
    "api.certificate_file",
    "api.key_file",
    "console.certificate_file",
    "console.key_file",
)
"""Paths that are relative to the directory of the file."""


def _rule(check: Any) -> Any:
    """Turn a parser of `core` into a validator; the text of its error becomes the message."""

    def validate(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError("should be a text")
        try:
            return check(value)
        except VaulteventsError as error:
            raise ValueError(str(error)) from error

    return validate


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _url(whose: str, *schemes: str) -> Callable[[SecretStr], SecretStr]:
    """Return a validator of URLs with these schemes and a host. Its messages omit the URL, which may hold a key."""

    def check(url: SecretStr) -> SecretStr:
        if not url.get_secret_value().startswith(tuple(f"{scheme}://" for scheme in schemes)):
            raise ValueError(f"a {whose}'s URL begins with {' or '.join(f'{scheme}://' for scheme in schemes)}")
        try:
            parts = urlsplit(url.get_secret_value())
            usable = bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number, or half an IPv6 address
            usable = False
        if not usable:
            raise ValueError(f"a {whose}'s URL has a host, and a port from 1 to 65535 where it has one")
        return url

    return check


def _meant(value: Any) -> Any:
    """Refuse booleans, which would pass as 0 or 1, and empty texts."""
    if isinstance(value, bool):
        raise ValueError("should not be true or false")
    if value == "":
        raise ValueError("is empty: give it a value or remove it")
    return value


COMMAS = BeforeValidator(_split)
"""Accept a text with commas as a list, as in the environment."""


def _proxy(url: SecretStr) -> SecretStr:
    try:
        parse_proxy(url.get_secret_value())
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return url


def _schedule(value: Any) -> Any:
    return _rule(parse_schedule)(value) if isinstance(value, str) else value


def _home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"there is no home directory {path.parts[0]}") from None


Url = Annotated[SecretStr, AfterValidator(_url("node", "http", "https"))]
SocketUrl = Annotated[SecretStr, AfterValidator(_url("WebSocket", "ws", "wss"))]
ContractAddress = Annotated[Address, BeforeValidator(_rule(parse_address))]
Allowed = Annotated[AllowRule, BeforeValidator(_rule(parse_allow))]
Cidr = Annotated[IPNetwork, BeforeValidator(_rule(parse_network))]
HeaderName = Annotated[str, BeforeValidator(_rule(check_plain_header))]
FilePath = Annotated[Path, AfterValidator(_home)]
Origin = Annotated[str, BeforeValidator(_rule(parse_origin))]
ProxyUrl = Annotated[SecretStr, AfterValidator(_proxy)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    _as_meant = field_validator("*", mode="before")(_meant)


class ExecutionSettings(Section):
    """Reading of the execution chain."""

    urls: Annotated[tuple[Url, ...], NoDecode, COMMAS] = Field(
        default=(),
        description=(
            "Execution nodes (JSON-RPC over HTTP), the preferred node first. With several, one honest node suffices."
        ),
    )
    websocket_urls: Annotated[tuple[SocketUrl, ...], NoDecode, COMMAS] = Field(
        default=(),
        description="WebSocket URLs of nodes that announce new blocks. An announcement triggers the next poll early.",
    )
    head: str = Field(
        default="finalized",
        description=(
            "Newest block from which fundings and claims are read: `finalized`, `safe` or `latest-N` (N blocks below "
            "the head). Above the finalized block a reorg can make an event untrue."
        ),
    )
    headers: Literal["every", "edges"] = Field(
        default="edges",
        description=(
            "Headers that a backfill reads: `edges` (those of blocks with events) or `every` (all, linked to each "
            "other)."
        ),
    )
    poll_interval_s: Seconds = Field(default=4.0, description="Pause between two polls for a new block.")
    span_blocks: int = Field(
        default=1000,
        ge=1,
        le=100_000,
        description="Blocks per commit. A backfill commits `max_range_blocks` at once if that is larger.",
    )
    max_range_blocks: int = Field(
        default=10_000,
        ge=1,
        le=100_000,
        description=(
            "Largest block range of one `eth_getLogs` call. Below it the range adapts to what each node accepts."
        ),
    )
    batch_size: int = Field(default=100, ge=1, le=1000, description="Largest number of calls in one JSON-RPC batch.")
    ask: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Number of nodes that are asked at the same time which blocks hold logs; all by default. The audit asks "
            "every node."
        ),
    )
    completeness: Literal["union", "receipts"] = Field(
        default="union",
        description=(
            "`union` reads each block that any node reports to hold logs. `receipts` reads each block whose bloom may "
            "hold a watched log: for one node of your own."
        ),
    )
    blooms_per_day: int = Field(
        default=10_000,
        ge=0,
        description=(
            "Blocks a day that are read only because of their bloom, where a single node answers. The live streams "
            "and the audit have this budget each."
        ),
    )
    max_answer_mb: int = Field(
        default=32,
        ge=1,
        le=4096,
        description="Largest response that is read from a node, in MiB.",
    )
    max_receipt_mb: int = Field(
        default=128,
        ge=1,
        le=4096,
        description="Largest single receipt that is read, in MiB, for a block that is too large for one response.",
    )
    timeout_s: Seconds = Field(default=30.0, description="Timeout of one request to a node.")
    audit_blocks_per_s: float = Field(
        default=20.0,
        ge=0,
        allow_inf_nan=False,
        description=(
            "Blocks a second that the background audit reads again, for each node and stream. 0 disables the audit."
        ),
    )


class BeaconSettings(Section):
    """Reading of the beacon chain."""

    urls: Annotated[tuple[Url, ...], NoDecode, COMMAS] = Field(
        default=(),
        description=(
            "Beacon nodes (Beacon API over HTTP), the preferred node first. Without one, activations, exits and "
            "withdrawals are not watched."
        ),
    )
    poll_interval_s: Seconds = Field(default=12.0, description="Pause between two polls for finality.")
    scan: Literal["json", "ssz"] = Field(
        default="json",
        description=(
            "Source of the whole validator set: `json` (the validators list) or `ssz` (the state from the debug "
            "routes, several times faster)."
        ),
    )
    validators: Literal["auto", "list", "deposits"] = Field(
        default="auto",
        description=(
            "How validators of vaults are found: in the `list` of all validators, by the vaults' `deposits` on the "
            "execution chain, or `auto`: in the list, unless the beacon nodes refuse it."
        ),
    )
    deposits_from_block: int | None = Field(
        default=None,
        ge=0,
        description=(
            "First block in which deposits are looked for. By default the first one of October 2025 on mainnet, which "
            "is before the first vault, and the first block of the chain elsewhere."
        ),
    )
    timeout_s: Seconds = Field(default=30.0, description="Timeout of one request to a beacon node.")


class ReportSettings(Section):
    """Files of oracle reports."""

    gateways: Annotated[tuple[Url, ...], NoDecode, COMMAS] = Field(
        default=(),
        description=(
            "IPFS gateways that serve the files of oracle reports, tried in turn. Each file is verified against the "
            "chain. Without a gateway, reports are not watched."
        ),
    )
    poll_interval_s: Seconds = Field(default=12.0, description="Pause between two polls for published reports.")
    simulate: Literal["off", "on"] = Field(
        default="off",
        description=(
            "`on` executes each calldata with `eth_call` at the publishing block and logs why it would revert. The "
            "event is sent either way."
        ),
    )


class ContractSettings(Section):
    """Addresses of the Lido protocol on this network; empty on a devnet."""

    lido_locator: ContractAddress | None = Field(
        default=None,
        description=(
            "LidoLocator contract. At the start and in `check` it is asked for the present LazyOracle; one that is not "
            "in `lazy_oracles` is reported."
        ),
    )
    lazy_oracles: Annotated[tuple[ContractAddress, ...], NoDecode, COMMAS] = Field(
        default=(),
        description=(
            "LazyOracle contracts that publish reports. Keep former addresses, so that a replay over an upgrade gives "
            "the same events."
        ),
    )
    wrapper_factory: ContractAddress | None = Field(
        default=None,
        description=(
            "Factory of stVault wrapper pools; `check` verifies that the contract exists. `vault discover` and "
            "`vault add` find the withdrawal queue of a vault in its logs."
        ),
    )
    former_vault_factories: Annotated[tuple[ContractAddress, ...], NoDecode, COMMAS] = Field(
        default=(),
        description=(
            "Factories that made vaults before the present one, which the LidoLocator names. `vault discover` and "
            "`vault add` know their vaults, too."
        ),
    )
    first_block: int = Field(
        default=0,
        ge=0,
        description=(
            "No vault was created before this block: `vault discover` and `vault add` search the logs of the factories "
            "from it on."
        ),
    )
    core_withdrawal_queue: ContractAddress | None = Field(
        default=None,
        description="Withdrawal queue of the core protocol; `vault add` refuses it as the queue of a vault.",
    )


class DeliverySettings(Section):
    """Deliveries to webhooks."""

    schedule: Annotated[
        tuple[Annotated[int, Field(gt=0)], ...], NoDecode, BeforeValidator(_schedule), Field(min_length=1)
    ] = Field(
        default=SCHEDULE_S,
        description=(
            "Delays after the 1st, 2nd … failed attempt, each plus up to 20 % jitter. One more attempt follows the "
            "last delay; then the delivery is exhausted."
        ),
    )
    concurrency: int = Field(
        default=4096,
        ge=1,
        le=50_000,
        description="Largest number of attempts in flight in one process.",
    )
    per_webhook: int = Field(default=10, ge=1, le=1000, description="Attempts in flight for one webhook at first.")
    per_webhook_max: int = Field(
        default=256,
        ge=1,
        le=1000,
        description=(
            "Attempts in flight for one webhook while its receiver accepts promptly. The same value as `per_webhook` "
            "makes the limit fixed."
        ),
    )
    park_after: int = Field(
        default=5,
        ge=1,
        description=(
            "Failures in a row after which a webhook is parked: one attempt at a time, with a pause after each failure."
        ),
    )
    park_first_s: Seconds = Field(
        default=30.0,
        description="First pause of a parked webhook; each further pause is twice as long.",
    )
    park_longest_s: Seconds = Field(default=600.0, description="Longest pause of a parked webhook.")
    connect_timeout_s: Seconds = Field(default=5.0, description="Timeout for the connection to a receiver.")
    timeout_s: Annotated[Seconds, Field(lt=60)] = Field(default=15.0, description="Timeout of one attempt as a whole.")
    lease_s: Seconds = Field(
        default=60.0,
        description="Time after which an attempt that is still unsettled is repeated. Must exceed `timeout_s`.",
    )
    poll_interval_s: Seconds = Field(
        default=1.0,
        description="Pause between two queries for due deliveries; PostgreSQL notifications shorten it.",
    )
    ports: Annotated[frozenset[Port], NoDecode, COMMAS] = Field(
        default=DEFAULT_PORTS,
        description="Ports that webhook URLs may use.",
    )
    allow: Annotated[tuple[Allowed, ...], NoDecode, COMMAS] = Field(
        default=(),
        description=(
            "Private networks that webhooks may reach, as `network`, `network:port` or `network:*` for any port."
        ),
    )
    deny: Annotated[tuple[Cidr, ...], NoDecode, COMMAS] = Field(
        default=(),
        description="Further networks that webhooks may not reach.",
    )
    ca_file: FilePath | None = Field(
        default=None,
        description="PEM file with a certificate authority that is trusted for receivers.",
    )
    proxy_url: ProxyUrl | None = Field(
        default=None,
        description=(
            "Forward proxy for deliveries, such as Smokescreen: `http://host:port` or `http://user:password@host:port`."
        ),
    )
    plain_signature_header: HeaderName | None = Field(
        default=None,
        description="Name of one more header: the hexadecimal HMAC-SHA256 of the body, keyed with the newest secret.",
    )

    @model_validator(mode="after")
    def _leases_outlive_attempts(self) -> Self:
        if self.lease_s <= self.timeout_s:
            raise ValueError(
                f"lease_s ({self.lease_s:g} s) must exceed timeout_s ({self.timeout_s:g} s), or deliveries are repeated"
            )
        return self


class ApiSettings(Section):
    """The HTTP API for accounts."""

    serve: Literal["on", "off"] = Field(default="on", description="`off`: this process serves no HTTP API.")
    host: str = Field(default="127.0.0.1", description="Address on which the API listens.")
    port: int = Field(default=8420, ge=0, le=65535, description="Port on which the API listens.")
    certificate_file: FilePath | None = Field(
        default=None,
        description=(
            "PEM file with the certificate chain for TLS. Without it the API speaks plain HTTP, for a TLS proxy in "
            "front."
        ),
    )
    key_file: FilePath | None = Field(default=None, description="PEM file with the private key of the certificate.")
    public_origins: Annotated[tuple[Origin, ...], NoDecode, COMMAS] = Field(
        default=(),
        description="Origins of URLs that clients may sign in full, such as `https://api.example.org`.",
    )
    trusted_proxies: Annotated[tuple[Cidr, ...], NoDecode, COMMAS] = Field(
        default=(),
        description="Peers whose `X-Forwarded-For` gives the address of a client.",
    )
    nonce_max: int = Field(
        default=99_999,
        ge=99_999,
        lt=2**63,
        description="Largest nonce of a token; raise it for clients that draw from a wider range.",
    )
    requests_per_minute: int = Field(default=240, ge=1, description="Rate limit of each API key in each process.")
    burst: int = Field(default=40, ge=1, description="Requests of an API key that may come at once.")
    webhooks_per_account: int = Field(default=20, ge=1, description="Largest number of webhooks of one account.")
    requests_at_once: int = Field(
        default=4,
        ge=1,
        description=(
            "Requests of one account that use the database at the same time. Up to 100 more wait; further requests "
            "get 429."
        ),
    )
    max_connections: int = Field(
        default=1000,
        ge=1,
        le=50_000,
        description="Largest number of open connections. For a new connection the longest idle one is closed.",
    )
    connections_per_address: int = Field(
        default=100,
        ge=1,
        description="Open connections of one IPv4 address or IPv6 /64, except for `trusted_proxies`.",
    )
    answer_timeout_s: Seconds = Field(
        default=10.0,
        description=(
            "Time after which a client that reads nothing of its response is disconnected; one more second for each "
            "64 KiB."
        ),
    )

    @model_validator(mode="after")
    def _certificate_with_key(self) -> Self:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file belong together: give both or none")
        return self


class ConsoleSettings(Section):
    """The operator's console, on a listener of its own. `vaultevents console` prints a link to log in."""

    serve: Literal["on", "off"] = Field(default="on", description="`off`: this process serves no console.")
    host: str = Field(
        default="127.0.0.1",
        description="Address on which the console listens. Beyond loopback it requires TLS or `trusted_proxies`.",
    )
    port: int = Field(default=8421, ge=0, le=65535, description="Port on which the console listens.")
    public_origin: Origin | None = Field(
        default=None,
        description=(
            "Origin under which browsers reach the console, such as `https://ops.example.org`, where it differs from "
            "the address above."
        ),
    )
    certificate_file: FilePath | None = Field(
        default=None,
        description="PEM file with the certificate chain for TLS. Without it the console speaks plain HTTP.",
    )
    key_file: FilePath | None = Field(default=None, description="PEM file with the private key of the certificate.")
    trusted_proxies: Annotated[tuple[Cidr, ...], NoDecode, COMMAS] = Field(
        default=(),
        description=(
            "TLS proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are trusted. On a plain listener beyond "
            "loopback only requests that came to one of them by TLS are served."
        ),
    )

    @model_validator(mode="after")
    def _certificate_with_key(self) -> Self:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file belong together: give both or none")
        return self

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine reaches the listener."""
        try:
            return ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def needs_proxy(self) -> bool:
        """Whether a request is served only if a trusted proxy received it by TLS."""
        return not self.on_loopback and self.certificate_file is None

    @model_validator(mode="after")
    def _private_or_encrypted(self) -> Self:
        if self.serve == "on" and self.needs_proxy and not self.trusted_proxies:
            raise ValueError(
                f"the console would send its login unencrypted from {self.host}: set certificate_file and key_file, "
                "name the TLS proxy in front in trusted_proxies, or listen on 127.0.0.1"
            )
        return self


class OperatorSettings(Section):
    """Notices for the operator, signed with `operator_secret`."""

    webhook_url: Url | None = Field(
        default=None,
        description=(
            "URL to which notices for the operator are posted. Requires `operator_secret` or `operator_secret_file`."
        ),
    )


class RetentionSettings(Section):
    """Retention of finished deliveries."""

    keep_days: int = Field(
        default=0,
        ge=0,
        le=36_500,
        description="Days after which delivered and cancelled deliveries are pruned with their attempts. 0 keeps them.",
    )


class MetricsSettings(Section):
    """Metrics and health of this process, on a separate listener."""

    serve: Literal["off", "on"] = Field(
        default="on",
        description=(
            "`on` serves `/metrics` for Prometheus, `/healthz` and `/readyz` on a separate port. Where this "
            "table is empty and the port is in use, a warning is logged instead of an error."
        ),
    )
    host: str = Field(default="127.0.0.1", description="Address of that listener.")
    port: int = Field(default=9464, ge=0, le=65535, description="Port of that listener.")


class LogSettings(Section):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="Lowest level that is logged.",
    )
    format: Literal["auto", "text", "json"] = Field(
        default="auto",
        description="`text`, `json` (one object a line), or `auto`: text on a terminal, JSON otherwise.",
    )


class Settings(BaseSettings):
    """All settings. Built by `load`, or by `given`, which ignores the environment."""

    reads_environment: ClassVar[bool] = False
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        arbitrary_types_allowed=True,
    )

    network: Network = Field(description="Network to watch. `hoodi` and `mainnet` fix the chain id.")
    chain_id: int = Field(ge=1, description="Chain id (EIP-155) that every execution node must report.")
    data_dir: FilePath | None = Field(
        default=None,
        description=(
            "Directory of the embedded PostgreSQL, its master key and the cached report files. Default: "
            "`vaultevents/<network>` in the user data directory."
        ),
    )
    database_url: SecretStr | None = Field(
        default=None,
        description=(
            "URL of your own PostgreSQL, version 15 or newer. Without it the embedded PostgreSQL is used. Set it in "
            "the environment."
        ),
    )
    database_schema: str = Field(default="vaultevents", description="PostgreSQL schema that holds all tables.")
    master_key: SecretStr | None = Field(
        default=None,
        description=(
            "Master key that seals all secrets: 32 bytes in base64. Set it in the environment. With `database_url` "
            "this or `master_key_file` is required."
        ),
    )
    master_key_file: FilePath | None = Field(
        default=None,
        description=(
            "File with the master key, mode 0600. Default with the embedded PostgreSQL: `master.key` beside it."
        ),
    )
    master_key_previous: SecretStr | None = Field(
        default=None,
        description="Former master key, while master keys are rotated. Set it in the environment.",
    )
    master_key_previous_file: FilePath | None = Field(
        default=None,
        description="File with the former master key, mode 0600.",
    )
    operator_secret: SecretStr | None = Field(
        default=None,
        description="Secret that signs notices: `whsec_` and 32 random bytes in base64. Set it in the environment.",
    )
    operator_secret_file: FilePath | None = Field(default=None, description="File with that secret, mode 0600.")
    execution: ExecutionSettings = ExecutionSettings()
    beacon: BeaconSettings = BeaconSettings()
    reports: ReportSettings = ReportSettings()
    contracts: ContractSettings = ContractSettings()
    delivery: DeliverySettings = DeliverySettings()
    api: ApiSettings = ApiSettings()
    console: ConsoleSettings = ConsoleSettings()
    operator: OperatorSettings = OperatorSettings()
    retention: RetentionSettings = RetentionSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()

    @property
    def directory(self) -> Path:
        """The directory of the embedded database and its key file; by default one for each network."""
        directory = self.data_dir or Path(platformdirs.user_data_dir("vaultevents", appauthor=False)) / self.network
        return directory.absolute()

    _as_meant = field_validator("*", mode="before")(_meant)

    @property
    def watched_oracles(self) -> tuple[Address, ...]:
        """The oracles whose reports are watched: none without a gateway."""
        return self.contracts.lazy_oracles if self.reports.gateways else ()

    @model_validator(mode="after")
    def _chain_of_the_network(self) -> Self:
        known = CHAIN_IDS.get(self.network, self.chain_id)
        if self.chain_id != known:
            raise ValueError(
                f"'{self.network}' is chain {known}, and chain_id says {self.chain_id}: correct one of them"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (env_settings, init_settings) if cls.reads_environment else (init_settings,)


class _UnderEnvironment(Settings):
    """`Settings` where the environment overrides the file."""

    reads_environment: ClassVar[bool] = True


def chosen_file(path: Path | None = None) -> Path:
    """Return `path`, else the file named by VAULTEVENTS_CONFIG, else `vaultevents.toml` in the working directory."""
    return path or Path(os.environ.get(ENV_FILE) or DEFAULT_FILE)


def load(path: Path | None = None) -> Settings:
    """Load the settings of a file and the environment; raise `ConfigError` with a sentence that says what to correct.

    Relative paths in the file count from its directory, those in the environment from the working directory.
    """
    chosen = chosen_file(path)
    _refuse_unknown_variables()
    return _parse(_UnderEnvironment, _anchored(_read(chosen), chosen.absolute().parent), str(chosen))


def given(values: dict[str, Any], name: str) -> Settings:
    """Build settings from these values alone; `name` is their source in messages. Raises `ConfigError`."""
    return _parse(Settings, values, name)


def _parse(kind: type[Settings], values: dict[str, Any], name: str) -> Settings:
    if strange := [key for key in values if key.startswith("_")]:  # would be options of BaseSettings
        raise ConfigError(f"{name}: the key '{strange[0]}' is not known: remove it")
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(_sentence(error, name, os.environ if kind.reads_environment else ())) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration file {path}: make one with 'vaultevents init', or name it with --config"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _anchored(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    for name in PATHS:
        *tables, key = name.split(".")
        holder: Any = values
        for table in tables:
            holder = holder.get(table)
        if isinstance(holder, dict) and isinstance(holder.get(key), str) and not holder[key].startswith(("~", "/")):
            holder[key] = holder[key] and str(directory / holder[key])
    return values


def _tables() -> dict[str, type[BaseModel]]:
    found = {name: info.annotation for name, info in Settings.model_fields.items()}
    return {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, Section)}


def _refuse_unknown_variables() -> None:
    tables = _tables()
    names = [name for name in Settings.model_fields if name not in tables]
    names += [f"{table}__{key}" for table, kind in tables.items() for key in kind.model_fields]
    known = [
        ENV_FILE,
        CALL_KEY_VARIABLE,
        CALL_URL_VARIABLE,
        NEW_KEY_VARIABLE,
        *(f"{ENV_PREFIX}{name}".upper() for name in names),
    ]
    for name in os.environ:
        variable = name.upper()
        if not variable.startswith(ENV_PREFIX) or variable in known:
            continue
        if parts := [key for key in known if key.startswith(f"{variable}__")]:
            raise ConfigError(f"the environment variable {name} is a table: set its parts, such as {parts[0]}")
        close = difflib.get_close_matches(variable[len(ENV_PREFIX) :], [key[len(ENV_PREFIX) :] for key in known], 1)
        hint = f": did you mean {ENV_PREFIX}{close[0]}?" if close else ", so it has no effect: remove it"
        raise ConfigError(f"the environment variable {name} is not known{hint}")


_LISTS = {"tuple_type", "frozen_set_type"}
_TOO_SHORT = re.compile(r"\w+ (should have at least \d+ item).*")


def _sentence(error: ValidationError, name: str, environment: Iterable[str]) -> str:
    """Describe the first error by the name of its setting, without the value, which may be a secret."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = [part for part in first["loc"] if isinstance(part, str)]
    where, kind = ".".join(path), first["type"]
    if kind == "extra_forbidden":
        return f"{name}: the key '{where}' is not known: {_advice(path)}"
    if kind == "missing":
        return f"{name}: '{where}' is missing: add it ('vaultevents init' writes an example)"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if kind == "model_type":
        message = f"should be a table: write [{where}]"
    elif kind in _LISTS:
        message = "should be a list"
    message = _TOO_SHORT.sub(r"\1", message)
    variable = f"{ENV_PREFIX}{'__'.join(path)}".upper()
    subject = f"{name}: '{where}'" if path else name
    if variable in map(str.upper, environment):
        subject = f"the environment variable {variable}"
    return f"{subject} {message}" if message.startswith(("should ", "is ")) else f"{subject}: {message}"


REMOVED = {
    "suspicion_share": "blocks with events are proven by their receipts now",
    "agreement": "every node is asked, and one honest node suffices; see 'ask' and docs/trust.md",
}
"""Keys of earlier versions, and what replaced them."""


def _advice(path: Sequence[str]) -> str:
    """Suggest the table of an unknown key, or a similar name."""
    if path[-1] in REMOVED:
        return f"remove it: {REMOVED[path[-1]]}"
    tables, key = _tables(), path[-1]
    if homes := [f"[{table}]" for table, kind in tables.items() if key in kind.model_fields]:
        return f"it belongs under {' or '.join(homes)}"
    if key in Settings.model_fields:
        return "it belongs above the first [table]"
    beside = tables[path[0]] if len(path) > 1 else Settings
    close = difflib.get_close_matches(key, list(beside.model_fields), 1)
    return f"did you mean '{close[0]}'?" if close else "remove it"
