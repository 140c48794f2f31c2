"""One frozen `Settings`: the TOML file, then the environment over it (secrets belong there). Parsed once."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
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
CHAIN_IDS = {"hoodi": 560048, "mainnet": 1}
"""A devnet may have any."""
PATHS = (
    "data_dir",
    "master_key_file",
    "master_key_previous_file",
    "operator_secret_file",
    "delivery.ca_file",
    "api.certificate_file",
    "api.key_file",
)
"""Settings of the file that count from its directory when they are relative."""


def _rule(check: Any) -> Any:
    """Lets a rule of the core, which is for texts, speak as a validator: its sentence becomes the message."""

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
    """A URL of one of the schemes, with a host. What is wrong with it is told without it: it may hold a key."""

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
    """No setting is a boolean, which would pass as 0 or 1, and none says anything by being an empty text."""
    if isinstance(value, bool):
        raise ValueError("should not be true or false")
    if value == "":
        raise ValueError("is empty: give it a value or remove it")
    return value


COMMAS = BeforeValidator(_split)
"""A list that may also be a text with commas, as the environment has it."""


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
    """How the execution chain is read."""

    urls: Annotated[tuple[Url, ...], NoDecode, COMMAS] = ()
    websocket_urls: Annotated[tuple[SocketUrl, ...], NoDecode, COMMAS] = ()
    head: str = "finalized"
    headers: Literal["every", "edges"] = "edges"
    poll_interval_s: Seconds = 4.0
    span_blocks: int = Field(default=1000, ge=1, le=100_000)
    max_range_blocks: int = Field(default=10_000, ge=1, le=100_000)
    batch_size: int = Field(default=100, ge=1, le=1000)
    ask: int | None = Field(default=None, ge=1)
    completeness: Literal["union", "receipts"] = "union"
    blooms_per_day: int = Field(default=10_000, ge=0)
    max_answer_mb: int = Field(default=32, ge=1, le=4096)
    max_receipt_mb: int = Field(default=128, ge=1, le=4096)
    timeout_s: Seconds = 30.0
    audit_blocks_per_s: float = Field(default=20.0, ge=0, allow_inf_nan=False)


class BeaconSettings(Section):
    """How the beacon chain is read; without a URL activations, exits and withdrawals are not watched."""

    urls: Annotated[tuple[Url, ...], NoDecode, COMMAS] = ()
    poll_interval_s: Seconds = 12.0
    scan: Literal["json", "ssz"] = "json"
    timeout_s: Seconds = 30.0


class ReportSettings(Section):
    """Where the files of oracle reports come from; without a gateway reports are not watched."""

    gateways: Annotated[tuple[Url, ...], NoDecode, COMMAS] = ()
    poll_interval_s: Seconds = 12.0
    simulate: Literal["off", "on"] = "off"


class ContractSettings(Section):
    """Addresses of the protocol on this network; empty on a devnet."""

    lido_locator: ContractAddress | None = None
    lazy_oracles: Annotated[tuple[ContractAddress, ...], NoDecode, COMMAS] = ()
    wrapper_factory: ContractAddress | None = None
    core_withdrawal_queue: ContractAddress | None = None


class DeliverySettings(Section):
    """How webhooks are posted."""

    schedule: Annotated[
        tuple[Annotated[int, Field(gt=0)], ...], NoDecode, BeforeValidator(_schedule), Field(min_length=1)
    ] = SCHEDULE_S
    concurrency: int = Field(default=4096, ge=1, le=50_000)
    per_webhook: int = Field(default=10, ge=1, le=1000)
    per_webhook_max: int = Field(default=256, ge=1, le=1000)
    park_after: int = Field(default=5, ge=1)
    park_first_s: Seconds = 30.0
    park_longest_s: Seconds = 600.0
    connect_timeout_s: Seconds = 5.0
    timeout_s: Annotated[Seconds, Field(lt=60)] = 15.0
    lease_s: Seconds = 60.0
    poll_interval_s: Seconds = 1.0
    ports: Annotated[frozenset[Port], NoDecode, COMMAS] = DEFAULT_PORTS
    allow: Annotated[tuple[Allowed, ...], NoDecode, COMMAS] = ()
    deny: Annotated[tuple[Cidr, ...], NoDecode, COMMAS] = ()
    ca_file: FilePath | None = None
    proxy_url: ProxyUrl | None = None
    plain_signature_header: HeaderName | None = None

    @model_validator(mode="after")
    def _leases_outlive_attempts(self) -> Self:
        if self.lease_s <= self.timeout_s:
            raise ValueError(
                f"lease_s ({self.lease_s:g} s) must exceed timeout_s ({self.timeout_s:g} s), or deliveries are repeated"
            )
        return self


class ApiSettings(Section):
    """How customers are served (decisions A9-A20)."""

    serve: Literal["on", "off"] = "on"
    host: str = "127.0.0.1"
    port: int = Field(default=8420, ge=0, le=65535)
    certificate_file: FilePath | None = None
    key_file: FilePath | None = None
    public_origins: Annotated[tuple[Origin, ...], NoDecode, COMMAS] = ()
    trusted_proxies: Annotated[tuple[Cidr, ...], NoDecode, COMMAS] = ()
    nonce_max: int = Field(default=99_999, ge=99_999, lt=2**63)
    requests_per_minute: int = Field(default=240, ge=1)
    burst: int = Field(default=40, ge=1)
    webhooks_per_account: int = Field(default=20, ge=1)
    requests_at_once: int = Field(default=4, ge=1)
    max_connections: int = Field(default=1000, ge=1, le=50_000)
    connections_per_address: int = Field(default=100, ge=1)
    answer_timeout_s: Seconds = 10.0

    @model_validator(mode="after")
    def _certificate_with_key(self) -> Self:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file belong together: give both or none")
        return self


class OperatorSettings(Section):
    """Where notices for the operator are posted; the secret that signs them is `operator_secret`."""

    webhook_url: Url | None = None


class RetentionSettings(Section):
    """How long finished deliveries are kept with their attempts; 0 days: for good."""

    keep_days: int = Field(default=0, ge=0, le=36_500)


class MetricsSettings(Section):
    """Where this process tells metrics and health, on a listener of its own."""

    serve: Literal["off", "on"] = "off"
    host: str = "127.0.0.1"
    port: int = Field(default=9464, ge=0, le=65535)


class LogSettings(Section):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json"] = "auto"


class Settings(BaseSettings):
    """Everything an operator can set. Made by `load`, or by `given`, which does not look at the environment."""

    reads_environment: ClassVar[bool] = False
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        arbitrary_types_allowed=True,
    )

    network: Network
    chain_id: int = Field(ge=1)
    data_dir: FilePath | None = None
    database_url: SecretStr | None = None
    database_schema: str = "vaultevents"
    master_key: SecretStr | None = None
    master_key_file: FilePath | None = None
    master_key_previous: SecretStr | None = None
    master_key_previous_file: FilePath | None = None
    operator_secret: SecretStr | None = None
    operator_secret_file: FilePath | None = None
    execution: ExecutionSettings = ExecutionSettings()
    beacon: BeaconSettings = BeaconSettings()
    reports: ReportSettings = ReportSettings()
    contracts: ContractSettings = ContractSettings()
    delivery: DeliverySettings = DeliverySettings()
    api: ApiSettings = ApiSettings()
    operator: OperatorSettings = OperatorSettings()
    retention: RetentionSettings = RetentionSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()

    @property
    def directory(self) -> Path:
        """Where the embedded database and its key file live: by default one per network, in the user's data."""
        directory = self.data_dir or Path(platformdirs.user_data_dir("vaultevents", appauthor=False)) / self.network
        return directory.absolute()

    _as_meant = field_validator("*", mode="before")(_meant)

    @property
    def watched_oracles(self) -> tuple[Address, ...]:
        """Whose reports are watched: nobody's where their files cannot be had."""
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
    """The same, with the environment above what the file says."""

    reads_environment: ClassVar[bool] = True


def chosen_file(path: Path | None = None) -> Path:
    """`path`, else the file named by VAULTEVENTS_CONFIG, else `vaultevents.toml` in the working directory."""
    return path or Path(os.environ.get(ENV_FILE) or DEFAULT_FILE)


def load(path: Path | None = None) -> Settings:
    """The settings of a file and the environment; raises `ConfigError` with one sentence that says what to mend.

    Relative paths in the file count from its directory, those in the environment from the working directory.
    """
    chosen = chosen_file(path)
    _refuse_unknown_variables()
    return _parse(_UnderEnvironment, _anchored(_read(chosen), chosen.absolute().parent), str(chosen))


def given(values: dict[str, Any], name: str) -> Settings:
    """Settings from these values alone; `name` says in messages where they came from. Raises `ConfigError`."""
    return _parse(Settings, values, name)


def _parse(kind: type[Settings], values: dict[str, Any], name: str) -> Settings:
    if strange := [key for key in values if key.startswith("_")]:  # they would be options of BaseSettings
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
        if parts := [one for one in known if one.startswith(f"{variable}__")]:
            raise ConfigError(f"the environment variable {name} is a table: set its parts, such as {parts[0]}")
        close = difflib.get_close_matches(variable[len(ENV_PREFIX) :], [one[len(ENV_PREFIX) :] for one in known], 1)
        hint = f": did you mean {ENV_PREFIX}{close[0]}?" if close else ", so it has no effect: remove it"
        raise ConfigError(f"the environment variable {name} is not known{hint}")


_LISTS = {"tuple_type", "frozen_set_type"}
_TOO_SHORT = re.compile(r"\w+ (should have at least \d+ item).*")


def _sentence(error: ValidationError, name: str, environment: Iterable[str]) -> str:
    """The first thing that is wrong, by its name; never the value, which may be a secret."""
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
"""Keys of earlier versions, and what has taken their place."""


def _advice(path: Sequence[str]) -> str:
    """Where a key that is not known belongs, or what it may have been meant to be."""
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
