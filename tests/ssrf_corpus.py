"""URLs and addresses that the rules against server-side request forgery are tested with (rules T1 and T2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from vaultevents.core.webhooks import Network, parse_network

_VECTORS: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("data").joinpath("ssrf/vectors.json").read_text())

REFUSED_URLS: Final[dict[str, str]] = {row["url"]: row["rule"] for row in _VECTORS["refused_urls"]}
"""URL → the rule that refuses it, a key of `RULE_TEXTS`."""
ACCEPTED_URLS: Final[dict[str, str]] = {row["url"]: row["kept"] for row in _VECTORS["accepted_urls"]}
"""URL → the form in which it is kept."""
DENIED_NETWORKS: Final[list[Network]] = [parse_network(row["network"]) for row in _VECTORS["denied_networks"]]
DENIED_ADDRESSES: Final[list[str]] = [row["address"] for row in _VECTORS["denied_addresses"]]
PUBLIC_ADDRESSES: Final[list[str]] = _VECTORS["public_addresses"]

RULE_TEXTS: Final = {
    "length": "characters: at most",
    "grammar": "the URL is not acceptable: write https://host/path",
    "control": "a percent-encoded control character",
    "port": "is not allowed in a webhook URL: use 443 or 8443",
    "name": "is not a host name",
    "local": "is a local name",
    "idna": "is not a valid international host name",
    "spelling": "is not an IP address in its",
    "address": "is not a public address",
}
"""What the message of a refusal by each rule says."""
