"""init: a configuration file that explains every setting."""

from __future__ import annotations

import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from vaultevents.cli.options import ConfigOption, JsonOption, one_of
from vaultevents.cli.terminal import put_json, say
from vaultevents.config import DEFAULT_FILE, NETWORKS, chosen_file
from vaultevents.core.errors import ConfigError, InputError


def init(
    network: Annotated[
        str, typer.Option(help=f"The network to watch: {', '.join(NETWORKS)}.", metavar="NETWORK")
    ] = "hoodi",
    config: ConfigOption = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a configuration file that explains every setting."""
    one_of(NETWORKS, network, "--network")
    path = chosen_file(config)
    if path.exists() and not force:
        raise InputError(
            f"{path} is already there: edit it, name another file with --config, or write over it (--force)"
        )
    _write_whole(path, _template(network))
    if as_json:
        put_json({"path": str(path), "network": network})
        return
    option = "" if path == DEFAULT_FILE else f" --config {path}"
    say(f"Wrote {path} for {network}. {_FIRST[network]} Next{f', each with{option}' if option else ''}:")
    say("  vaultevents check                                    does everything answer?")
    say("  vaultevents account add ACCOUNT                      an account, such as 'acme'")
    say("  vaultevents vault discover                           the vaults of the protocol (--owner, --register)")
    say("  vaultevents vault add ACCOUNT VAULT ADDRESS          a vault of the account (--start-block)")
    say("  vaultevents webhook add ACCOUNT URL                  where its events go; shows the secret once")
    say("  vaultevents run                                      watch and deliver")


_FIRST = {
    "devnet": "It expects a node at http://127.0.0.1:8545 with chain id 31337.",
    "hoodi": "It names public nodes, so it works as it is.",
    "mainnet": "Name your node in it (execution.urls).",
}


def _write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: a full disk must not cost the former file."""
    target = path.resolve()
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}): correct that, or name another file") from None


def _template(network: str) -> str:
    repository = Path(__file__).parents[3] / "config"
    for place in (resources.files("vaultevents").joinpath("networks"), repository):
        example = place.joinpath(f"{network}.toml")
        if example.is_file():
            return example.read_text(encoding="utf-8")
    raise ConfigError(f"this installation comes without its examples: copy config/{network}.toml from the repository")
