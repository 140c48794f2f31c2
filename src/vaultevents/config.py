"""One frozen `Settings`: the TOML file, then the environment over it (secrets belong there). Parsed once."""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from vaultevents.core.errors import ConfigError, VaulteventsError
from vaultevents.core.retries import SCHEDULE_S, parse_schedule
from vaultevents.core.signing import check_plain_header
from vaultevents.core.units import parse_address
from vaultevents.core.webhooks import DEFAULT_PORTS, parse_allow, parse_network

DEFAULT_FILE = Path("vaultevents.toml")
ENV_PREFIX = "VAULTEVENTS_"
NETWORKS = ("devnet", "hoodi", "mainnet")


def _rule(check: Any) -> Any:
    """Lets a rule of the core speak as a validator: its sentence becomes the message."""

    def validate(value: Any) -> Any:
        try:
            return check(value)
        except VaulteventsError as error:
            raise ValueError(str(error)) from error

    return validate


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _each(check: Any) -> Any:
    return _rule(lambda values: tuple(check(value) for value in values))


def _http_url(url: SecretStr) -> SecretStr:
    if not url.get_secret_value().startswith(("http://", "https://")):
        raise ConfigError("a node's URL begins with http:// or https://")
    return url


def _schedule(value: Any) -> Any:
    return parse_schedule(value) if isinstance(value, str) else value


Url = Annotated[SecretStr, AfterValidator(_rule(_http_url))]
Addresses = Annotated[tuple[Any, ...], NoDecode, BeforeValidator(_split), AfterValidator(_each(parse_address))]
ContractAddress = Annotated[Any, AfterValidator(_rule(parse_address))]


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class ExecutionSettings(Section):
    """How the execution chain is read."""

    urls: Annotated[tuple[Url, ...], NoDecode, BeforeValidator(_split)] = ()
    head: str = "finalized"
    headers: Literal["every", "edges"] = "every"
    poll_interval_s: float = Field(default=4.0, gt=0)
    span_blocks: int = Field(default=1000, ge=1, le=100_000)
    max_range_blocks: int = Field(default=10_000, ge=1)
    batch_size: int = Field(default=100, ge=1, le=1000)
    suspicion_share: float = Field(default=1.0, ge=0, le=1)
    timeout_s: float = Field(default=30.0, gt=0)


class ContractSettings(Section):
    """Addresses of the protocol on this network; empty on a devnet."""

    lido_locator: ContractAddress | None = None
    lazy_oracles: Addresses = ()
    wrapper_factory: ContractAddress | None = None
    core_withdrawal_queue: ContractAddress | None = None


class DeliverySettings(Section):
    """How webhooks are posted."""

    schedule: Annotated[tuple[int, ...], NoDecode, BeforeValidator(_rule(_schedule))] = SCHEDULE_S
    concurrency: int = Field(default=64, ge=1, le=10_000)
    connect_timeout_s: float = Field(default=5.0, gt=0)
    timeout_s: float = Field(default=15.0, gt=0, lt=60)
    lease_s: float = Field(default=60.0, gt=0)
    poll_interval_s: float = Field(default=1.0, gt=0)
    ports: Annotated[frozenset[int], NoDecode, BeforeValidator(_split)] = DEFAULT_PORTS
    allow: Annotated[tuple[Any, ...], NoDecode, BeforeValidator(_split), AfterValidator(_each(parse_allow))] = ()
    deny: Annotated[tuple[Any, ...], NoDecode, BeforeValidator(_split), AfterValidator(_each(parse_network))] = ()
    ca_file: Path | None = None
    plain_signature_header: Annotated[str | None, AfterValidator(_rule(lambda v: v and check_plain_header(v)))] = None


class LogSettings(Section):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json"] = "auto"


class Settings(BaseSettings):
    """Everything an operator can set."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_nested_delimiter="__", arbitrary_types_allowed=True
    )

    network: Literal["devnet", "hoodi", "mainnet"]
    chain_id: int = Field(ge=1)
    data_dir: Path | None = None
    database_url: SecretStr | None = None
    database_schema: str = "vaultevents"
    master_key: SecretStr | None = None
    master_key_file: Path | None = None
    execution: ExecutionSettings = ExecutionSettings()
    contracts: ContractSettings = ContractSettings()
    delivery: DeliverySettings = DeliverySettings()
    log: LogSettings = LogSettings()

    @property
    def directory(self) -> Path:
        """Where the embedded database and its key file live: by default one per network, in the user's data."""
        return self.data_dir or Path(platformdirs.user_data_dir("vaultevents", appauthor=False)) / self.network

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment stands above what the file says."""
        return (env_settings, init_settings)


def load(path: Path | None = None) -> Settings:
    """The settings of a file and the environment; raises `ConfigError` with one sentence that says what to mend.

    Without `path`: the file named by VAULTEVENTS_CONFIG, else `vaultevents.toml` in the working directory.
    """
    chosen = path or Path(os.environ.get(f"{ENV_PREFIX}CONFIG", DEFAULT_FILE))
    _refuse_unknown_variables()
    return parse(_read(chosen), str(chosen))


def parse(values: dict[str, Any], name: str, *, env_prefix: str = ENV_PREFIX) -> Settings:
    """Settings from already parsed values, under the environment's; `name` says in messages where they came from."""
    try:
        return Settings(_env_prefix=env_prefix, **values)
    except ValidationError as error:
        raise ConfigError(f"{name}: {_sentence(error)}") from None


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


def _refuse_unknown_variables() -> None:
    known = {f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields} | {f"{ENV_PREFIX}CONFIG"}
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name.split("__")[0] not in known:
            close = difflib.get_close_matches(name, sorted(known), 1)
            hint = f": did you mean {close[0]}?" if close else ", so it has no effect: remove it"
            raise ConfigError(f"the environment variable {name} is not known{hint}")


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong, by its name in the file; never the value, which may be a secret."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(first["loc"][-1]), _names_beside(first["loc"]), 1)
        return f"the key '{where}' is not known" + (f": did you mean '{close[0]}'?" if close else ": remove it")
    if first["type"] == "missing":
        return f"'{where}' is missing: add it (see 'vaultevents init' for an example)"
    return f"'{where}': {first['msg'].removeprefix('Value error, ')}"


def _names_beside(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Settings
    for part in location[:-1]:
        inner = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)
