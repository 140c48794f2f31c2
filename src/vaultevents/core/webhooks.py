"""Webhooks: what one receives, and which URLs and addresses may be posted to (rules D9, D10, A3 and A4).

The URL rules and the table of denied addresses are those of the server-side request forgery (SSRF) rules: there is one
strict parser, used when a webhook is created, when it is changed and at every attempt, so that no second parser can
read a URL differently. `ipaddress.is_global` is never asked: it passes many of the ranges below and its answers change
between versions of Python.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Final, Literal

import idna

from vaultevents.core.errors import ConfigError, InputError
from vaultevents.core.events import EVENT_TYPES, Event

IPAddress = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

DEFAULT_PORTS: Final = frozenset({443, 8443})
MAX_URL_CHARS: Final = 2048


@dataclass(frozen=True, slots=True)
class Webhook:
    """A subscription of one account. `None` as a filter means all, vaults added later included (rule D9)."""

    id: str
    account_id: str
    url: str
    event_types: tuple[str, ...] | None
    vault_ids: tuple[str, ...] | None
    active: bool


def matches(webhook: Webhook, event: Event) -> bool:
    """Test whether `webhook` receives `event`: same account, active, and both filters match."""
    return (
        webhook.active
        and webhook.account_id == event.owner.account_id
        and (webhook.event_types is None or event.event_type in webhook.event_types)
        and (webhook.vault_ids is None or event.owner.vault_id in webhook.vault_ids)
    )


def check_event_types(names: Iterable[str] | None) -> tuple[str, ...] | None:
    """A filter of event types as a client sends it, each once; `None` is all. Raises `InputError` (rule A3)."""
    if names is None:
        return None
    wanted = tuple(dict.fromkeys(names))
    if not wanted:
        raise InputError("eventTypes is empty, so nothing would ever be sent: name at least one, or send null for all")
    for name in wanted:
        if name not in EVENT_TYPES:
            raise InputError(f"{name!r} is not an event type: use {', '.join(EVENT_TYPES)}")
    return wanted


def check_vault_ids(ids: Iterable[str] | None, known: Collection[str]) -> tuple[str, ...] | None:
    """A filter of vaults, each once; `known` are the account's own, present ones. `None` is all.

    Raises `InputError`, with one text for unknown, foreign and removed ids (rule A3).
    """
    if ids is None:
        return None
    wanted = tuple(dict.fromkeys(ids))
    if not wanted:
        raise InputError("stakingVaultIds is empty, so nothing would ever be sent: name one, or send null for all")
    for vault_id in wanted:
        if vault_id not in known:
            raise InputError(f"{vault_id!r} is not a vault of this account")
    return wanted


_DENIED_IPV4: Final = tuple(
    IPv4Network(row)
    for row in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier NAT, cloud metadata
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure platform address
        "169.254.0.0/16",  # link local, metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relay
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_GLOBAL_IPV6: Final = IPv6Network("2000::/3")  # all outside is denied: loopback, mapped, NAT64, local, multicast
_DENIED_IPV6: Final = tuple(
    IPv6Network(row)
    for row in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, embeds IPv4
        "3fff::/20",  # documentation
    )
)
_EMBEDS_IPV4: Final = (IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))  # mapped, NAT64


def is_denied(ip: IPAddress) -> bool:
    """Whether the deny table has this address: anything that is not plainly a public unicast address."""
    if isinstance(ip, IPv4Address):
        return any(ip in network for network in _DENIED_IPV4)
    return ip not in _GLOBAL_IPV6 or any(ip in network for network in _DENIED_IPV6)


def _embedded_ipv4(ip: IPAddress) -> IPv4Address | None:
    if isinstance(ip, IPv6Address) and any(ip in network for network in _EMBEDS_IPV4):
        return IPv4Address(ip.packed[-4:])
    return None


@dataclass(frozen=True, slots=True)
class AllowRule:
    """The operator allows `network` at one port, at the ports that are allowed anyway, or at any port (rule D10)."""

    network: Network
    port: int | Literal["usual", "any"] = "usual"

    def __str__(self) -> str:
        """Write the rule as in the settings."""
        if self.port == "usual":
            return str(self.network)
        network = f"[{self.network}]" if self.network.version == 6 else str(self.network)
        return f"{network}:{'*' if self.port == 'any' else self.port}"

    def takes(self, port: int, usual: Collection[int]) -> bool:
        if self.port == "usual":
            return port in usual
        return self.port in ("any", port)


@dataclass(frozen=True, slots=True)
class UrlRules:
    """What the operator's settings say about URLs: ports, private networks that are allowed, more that are denied."""

    ports: frozenset[int] = DEFAULT_PORTS
    allow: tuple[AllowRule, ...] = ()
    deny: tuple[Network, ...] = ()

    def takes_port(self, port: int) -> bool:
        """Whether some address may be reached at this port."""
        return port in self.ports or any(rule.takes(port, self.ports) for rule in self.allow)

    def allows(self, ip: IPAddress, port: int) -> bool:
        """Whether the operator has allowed this very address and port; one that embeds IPv4 is judged twice."""
        if any(ip in network for network in self.deny):
            return False
        inner = _embedded_ipv4(ip)
        if inner is not None and not self.permits(inner, port):
            return False
        return any(ip in rule.network and rule.takes(port, self.ports) for rule in self.allow)

    def permits(self, ip: IPAddress, port: int) -> bool:
        """Whether a connection may go there: allowed by name, or public, at a usual port and not denied."""
        if self.allows(ip, port):
            return True
        return port in self.ports and not is_denied(ip) and not any(ip in network for network in self.deny)


_ALLOW = re.compile(r"(?:\[(?P<six>[^\]]*)\]|(?P<four>[^:\[\]]*))(?::(?P<port>\*|[1-9][0-9]{0,4}))?")


def parse_allow(text: str) -> AllowRule:
    """One entry of the operator's allow-list: `10.0.0.0/8`, `10.1.2.3/32:8443`, `127.0.0.0/8:*`, `[fd00::/8]:8443`.

    Without a port the usual ports hold, `*` is any port. Raises `ConfigError`.
    """
    entry = _ALLOW.fullmatch(text.strip())
    if entry is None or int((entry["port"] or "0").replace("*", "0")) > 65535:
        raise ConfigError(f"'{text}' is not an allowed network: write 10.0.0.0/8, 10.1.2.3/32:8443 or [fd00::/8]:*")
    network = parse_network(entry["four"] if entry["six"] is None else entry["six"])
    if entry["port"] is None:
        return AllowRule(network)
    return AllowRule(network, "any" if entry["port"] == "*" else int(entry["port"]))


def parse_network(text: str) -> Network:
    """A network in CIDR notation whose host bits are zero; raises `ConfigError`."""
    try:
        return ip_network(text)
    except ValueError as error:
        raise ConfigError(f"'{text}' is not a network in CIDR notation such as 10.0.0.0/8: {error}") from None


# RFC 3986, in ASCII only: nothing here needs a second look by another parser. Userinfo, fragment, backslash, white
# space and control characters are not in the grammar, so they cannot get in.
_URL = re.compile(
    r"https://(?P<host>\[[^\[\]/?#@\\]*\]|[^\[\]:/?#@\\]*)(?::(?P<port>[^/?#@\\]*))?"
    r"(?P<rest>(?:/(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/]|%[0-9A-Fa-f]{2})*)?"
    r"(?:\?(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?]|%[0-9A-Fa-f]{2})*)?)",
    re.IGNORECASE | re.ASCII,  # without ASCII, U+017F would pass as "s" and U+212A as "k"
)
_ENCODED_CONTROL = re.compile(r"%(?:[01][0-9A-F]|7F)", re.IGNORECASE)
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_LOCAL_NAMES: Final = ("localhost", "local", "internal", "onion")


def check_url(text: str, rules: UrlRules) -> str:
    """The URL in the form in which it is stored and posted to; raises `InputError` with what to change (rule D10).

    Only scheme and host can differ from `text`: they come back in lower case, an international name as its ASCII form,
    without a final dot. No name is looked up. The texts never repeat path or query, which may hold a receiver's token.
    """
    if len(text) > MAX_URL_CHARS:
        raise InputError(f"the URL has {len(text)} characters: at most {MAX_URL_CHARS} are accepted")
    parts = _URL.fullmatch(text)
    if parts is None:
        raise InputError(
            "the URL is not acceptable: write https://host/path without user name, fragment, backslash or white space, "
            "and percent-encode everything in path and query that is not plain ASCII"
        )
    if _ENCODED_CONTROL.search(parts["rest"]):
        raise InputError("the URL holds a percent-encoded control character: remove it")
    port = _checked_port(parts["port"], rules)
    host = _checked_host(parts["host"], port, rules)
    suffix = "" if parts["port"] is None else f":{port}"
    return f"https://{host}{suffix}{parts['rest']}"


def _checked_port(text: str | None, rules: UrlRules) -> int:
    if text is None:
        text = "443"
    if not _PORT.fullmatch(text) or int(text) > 65535 or not rules.takes_port(int(text)):
        usual = " or ".join(map(str, sorted(rules.ports)))
        raise InputError(f"port {text[:8]!r} is not allowed in a webhook URL: use {usual}")
    return int(text)


def _checked_host(text: str, port: int, rules: UrlRules) -> str:
    """The host in ASCII: a public address in canonical form, or a name of two labels or more that is not local."""
    if text.startswith("["):
        return f"[{_checked_literal(text[1:-1].lower(), IPv6Address, port, rules)}]"
    name = _ascii_name(text).removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):  # what resolvers read as an address: 127.1, 0x7f.1, 2130706433
        return _checked_literal(_ascii_name(text), IPv4Address, port, rules)
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise InputError(f"{text[:80]!r} is not a host name: labels of 1 to 63 letters, digits and hyphens, 253 in all")
    if len(labels) < 2 or labels[-1] in _LOCAL_NAMES:
        raise InputError(f"{name!r} is a local name: use a name that is known in public DNS")
    return name


def _ascii_name(text: str) -> str:
    if text.isascii():
        return text.lower()
    try:
        return idna.encode(text, uts46=True).decode("ascii").lower()
    except (idna.IDNAError, UnicodeError):
        raise InputError(f"{text[:80]!r} is not a valid international host name (IDNA 2008)") from None


def _canonical(ip: IPAddress) -> str:
    """Return the text of `ip`; an IPv4-mapped address in hexadecimal groups, as Python before 3.13 writes it."""
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        high, low = divmod(int(ip.ipv4_mapped), 1 << 16)
        return f"::ffff:{high:x}:{low:x}"
    return str(ip)


def _checked_literal(text: str, kind: type[IPAddress], port: int, rules: UrlRules) -> str:
    try:
        ip = kind(text)
    except ValueError:
        raise InputError(f"{text[:80]!r} is not an IP address in its usual form, such as 93.184.216.34") from None
    if _canonical(ip) != text or "%" in text:
        raise InputError(f"{text[:80]!r} is not an IP address in its canonical form")
    if not rules.permits(ip, port):
        raise InputError(f"{text} at port {port} is not a public address: the operator has to allow it first")
    return text
