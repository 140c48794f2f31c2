"""Filters, the URL parser and the deny table, against the tables of the SSRF rules."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from vaultevents.core.errors import ConfigError, InputError
from vaultevents.core.events import EVENT_TYPES, Event, FundingReceived, Observation
from vaultevents.core.registry import Owner
from vaultevents.core.units import Address, Hash32, Wei
from vaultevents.core.webhooks import (
    AllowRule,
    UrlRules,
    Webhook,
    check_event_types,
    check_url,
    check_vault_ids,
    is_denied,
    matches,
    parse_allow,
    parse_network,
)

pytestmark = pytest.mark.unit

RULES = UrlRules()

MUST_DENY = """
    0.0.0.0 0.1.2.3 10.254.0.0 172.16.10.65 192.168.10.65 100.100.0.0 100.100.100.200 127.0.0.1 127.254.254.254
    168.63.129.16 169.254.169.254 169.254.45.1 192.0.0.0 192.0.0.9 192.0.0.255 192.0.2.255 198.51.100.65 203.0.113.6
    192.88.99.3 198.18.0.0 198.19.255.255 224.1.2.3 233.252.0.16 240.240.240.240 255.255.255.255
    :: ::1 ::127.0.0.1 ::a9fe:a9fe ::ffff:127.0.0.1 ::ffff:0.0.0.1 ::ffff:169.254.169.254 ::ffff:8.8.8.8
    64:ff9b::a9fe:a9fe 64:ff9b::c0a8:0 64:ff9b::808:808 64:ff9b:1::dead:beef 100::1 2001::1 2001:10::1 2001:20::1
    2001:db8::1 3fff::dead:beef 2002:7f00:1:: 2002:c0a8:1::dead:beef 2002:c000:204::dead:beef 5f00::dead:beef
    fd00:ec2::254 fdee:3a45:9057::1 fd7a:115c:a1e0::1 fe80::dead:beef fe80::1%eth0 febf:ffff::dead:beef fec0::1
    ff02::1 ff0e::1
""".split()  # noqa: SIM905

MUST_PASS = """
    100.63.255.255 100.128.0.0 172.15.0.1 172.32.0.1 9.255.255.255 11.0.0.0 126.255.255.255 128.0.0.1 168.63.129.15
    168.63.129.17 169.253.255.255 169.255.0.0 192.0.1.0 192.0.3.0 192.88.98.255 192.88.100.0 192.167.255.255
    192.169.0.0 198.17.255.255 198.20.0.0 223.255.255.255 1.0.0.0 8.8.8.8 2001:200::1 2001:db9::1 2003::1
    2606:4700::1111 2000::1 3ffe::1 3fff:1000::1
""".split()  # noqa: SIM905

REFUSED_URLS = [
    # scheme and shape
    *("http://example.com/", "ftp://example.com/", "https:example.com", "https:///x", "https://", "//example.com/"),
    *(
        "example.com",
        "",
        "http\u017f://example.com/",
        " https://example.com/",
        "javascript:alert(1)",
        "https:/example.com",
    ),
    # numbers that resolvers read as addresses
    *("https://2130706433/", "https://0x7f000001/", "https://0177.0.0.1/", "https://127.1/", "https://0x7f.1/"),
    *("https://0/", "https://\u2460\u2461\u2466.\u24ea.\u24ea.\u2460/", "https://127.0.0.1/", "https://127.0.0.1./"),
    "https://\uff11\uff12\uff17\uff0e\uff10\uff0e\uff10\uff0e\uff11/",
    *("https://1.2.3.4.5/", "https://93.184.216.034/", "https://93.184.216.34./", "https://example.0x/"),
    *("https://10.0.0.1/", "https://169.254.169.254/latest/meta-data/", "https://256.1.1.1/"),
    # IPv6
    *("https://[::1]/", "https://[::ffff:7f00:1]/", "https://[0:0:0:0:0:0:0:1]/", "https://[fe80::1%25eth0]/"),
    *("https://[::ffff:127.0.0.1]/", "https://[2606:4700:0:0::1111]/", "https://[2606:4700::1111/", "https://[]/"),
    *("https://[64:ff9b::808:808]/", "https://2606:4700::1111/", "https://[2606:4700::1111]x/", "https://[8.8.8.8]/"),
    # local names
    *("https://localhost/", "https://LOCALHOST/", "https://localhost./", "https://a.localhost/", "https://x.internal/"),
    *("https://metadata.google.internal/", "https://metadata.google.internal./", "https://db/", "https://db./"),
    *("https://printer.local/", "https://abc.onion/", "https://ｌｏｃａｌｈｏｓｔ/", "https://x。internal/"),
    # authority tricks
    *("https://user@example.com/", "https://user:pw@example.com/", "https://@example.com/", "https://:@example.com/"),
    *("https://example.com#frag", "https://example.com/#", "https://a\\@b.example/", "https://example.com\\x"),
    *("https://example.com/\t", "https://exam\tple.com/", "https://example.com/\n", "https://example.com\n/"),
    *("https://example.com\n", "https://example.com/\x00", "https://example.com/%00", "https://example.com/%0d%0aX:1"),
    *("https://example%2ecom/", "https://example.com%00.evil.example/", "https://exam ple.com/", "https://a..example/"),
    *("https://.example.com/", "https://example.com../", "https://-a.example/", "https://a-.example/"),
    *("https://a_b.example/", "https://exa\u00admple/", "https://exa\u202emple.com/", "https://*.example.com/"),
    # ports
    *(f"https://example.com:{port}/" for port in ("0", "22", "5432", "65536", "", "0443", "+443", "443x", "４４３")),
    *("https://example.com:443:443/", "https://example.com:99999999999999999999/", "https://8.8.8.8:80/"),
    # path and query
    *("https://example.com/ü", "https://example.com/?q=ü", "https://example.com/a b", "https://example.com/%zz"),
    *('https://example.com/"', "https://example.com/<", "https://example.com/\u212a", "https://example.com/%7f"),
    # lengths
    *(f"https://{'a' * 64}.example/", f"https://{'a.' * 127}example/", "https://example.com/" + "a" * 2029),
]


@pytest.mark.parametrize("text", MUST_DENY)
def test_denied(text: str) -> None:
    ip = ip_address(text)
    assert is_denied(ip)
    assert not RULES.permits(ip, 443)


@pytest.mark.parametrize("text", MUST_PASS)
def test_neighbours_of_denied_ranges_pass(text: str) -> None:
    ip = ip_address(text)
    assert not is_denied(ip)
    assert RULES.permits(ip, 443)
    assert not RULES.permits(ip, 80)


def test_the_table_does_more_than_the_standard_library() -> None:
    passed_by_is_global = [text for text in MUST_DENY if ip_address(text).is_global]
    assert passed_by_is_global, "the own table would not be needed"


def test_there_are_enough_url_vectors() -> None:
    assert len(set(REFUSED_URLS)) >= 100


@pytest.mark.parametrize("text", REFUSED_URLS)
def test_refused_url(text: str) -> None:
    with pytest.raises(InputError):
        check_url(text, RULES)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("https://example.com", "https://example.com"),
        ("HTTPS://Example.COM./Hook?a=B%2fc", "https://example.com/Hook?a=B%2fc"),
        ("https://example.com:8443/a/../b//c;d=e", "https://example.com:8443/a/../b//c;d=e"),
        ("https://example.com:443?x", "https://example.com:443?x"),
        ("https://bücher.example/é".replace("é", "%C3%A9"), "https://xn--bcher-kva.example/%C3%A9"),
        ("https://ＥＸＡＭＰＬＥ。com/", "https://example.com/"),
        ("https://93.184.216.34/x", "https://93.184.216.34/x"),
        ("https://[2606:4700::1111]:8443/", "https://[2606:4700::1111]:8443/"),
        ("https://[2606:4700::ABCD]/", "https://[2606:4700::abcd]/"),
        ("https://r3---sn-x.example.com/", "https://r3---sn-x.example.com/"),
        ("https://1.2.3.4.example.com/", "https://1.2.3.4.example.com/"),
        ("https://mylocal.notinternal/", "https://mylocal.notinternal/"),
        ("https://example.com/" + "a" * 2028, "https://example.com/" + "a" * 2028),
        (f"https://{'a' * 63}.example/", f"https://{'a' * 63}.example/"),
    ],
)
def test_accepted_url(text: str, stored: str) -> None:
    assert check_url(text, RULES) == stored
    assert check_url(stored, RULES) == stored


def test_refusals_never_repeat_path_or_query() -> None:
    for url in ("http://example.com/t0ken?t0ken", "https://localhost/t0ken?t0ken", "https://example.com:1/t0ken#t0ken"):
        with pytest.raises(InputError) as refused:
            check_url(url, RULES)
        assert "t0ken" not in str(refused.value)


def allowing(*entries: str) -> UrlRules:
    return UrlRules(allow=tuple(parse_allow(entry) for entry in entries))


@pytest.mark.parametrize(
    ("entry", "address", "port", "permitted"),
    [
        ("127.0.0.0/8:*", "127.0.0.1", 1, True),
        ("127.0.0.0/8:*", "127.0.0.1", 65535, True),
        ("127.0.0.0/8:*", "10.0.0.1", 443, False),
        ("127.0.0.0/8:*", "8.8.8.8", 9999, False),
        ("10.0.0.0/8", "10.1.2.3", 443, True),
        ("10.0.0.0/8", "10.1.2.3", 8443, True),
        ("10.0.0.0/8", "10.1.2.3", 9000, False),
        ("10.1.2.3/32:9000", "10.1.2.3", 9000, True),
        ("10.1.2.3/32:9000", "10.1.2.3", 443, False),
        ("10.1.2.3", "10.1.2.3", 443, True),
        ("10.1.2.3/32:9000", "10.1.2.4", 9000, False),
        ("[fd00::/8]:8443", "fd00::1", 8443, True),
        ("[fd00::/8]:8443", "fe80::1", 8443, False),
        ("[fd00::/8]", "fd00::1", 443, True),
        # an address that embeds IPv4 is only as good as the IPv4 address
        ("[64:ff9b::/96]", "64:ff9b::808:808", 443, True),
        ("[64:ff9b::/96]", "64:ff9b::a9fe:a9fe", 443, False),
        ("[::/0]:*", "::ffff:127.0.0.1", 443, False),
        ("[::/0]:*", "::1", 443, True),
        # a public address at an unusual port is the operator's to allow as well
        ("8.8.8.8/32:9999", "8.8.8.8", 9999, True),
    ],
)
def test_allow_rules(entry: str, address: str, port: int, permitted: bool) -> None:
    assert allowing(entry).permits(ip_address(address), port) is permitted


def test_an_allowed_literal_is_accepted_at_its_port_only() -> None:
    rules = allowing("127.0.0.0/8:*", "[fd00::/8]:9443")
    assert check_url("https://127.0.0.1:12345/x", rules) == "https://127.0.0.1:12345/x"
    assert check_url("https://[fd00::1]:9443/x", rules) == "https://[fd00::1]:9443/x"
    # where a name leads is known at delivery, so only its port is judged here
    assert check_url("https://receiver.example:12345/x", rules) == "https://receiver.example:12345/x"
    for url in ("https://[fd00::1]/x", "https://10.0.0.1:12345/x", "https://localhost:12345/", "https://x.test:65536/"):
        with pytest.raises(InputError):
            check_url(url, rules)


def test_an_extra_denied_network_wins() -> None:
    rules = UrlRules(
        allow=(parse_allow("10.0.0.0/8"),), deny=(parse_network("10.5.0.0/16"), parse_network("8.8.8.0/24"))
    )
    assert rules.permits(ip_address("10.4.0.1"), 443)
    assert not rules.permits(ip_address("10.5.0.1"), 443)
    assert not rules.permits(ip_address("8.8.8.8"), 443)
    assert rules.permits(ip_address("8.8.4.4"), 443)


def test_parse_allow_forms() -> None:
    assert parse_allow(" 127.0.0.0/8:* ") == AllowRule(parse_network("127.0.0.0/8"), "any")
    assert parse_allow("10.0.0.0/8") == AllowRule(parse_network("10.0.0.0/8"), "usual")
    assert parse_allow("[fd00::/8]:8443") == AllowRule(parse_network("fd00::/8"), 8443)


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1/8", "10.0.0.0/33", "fd00::/8", "10.0.0.0/8:", "10.0.0.0/8:0", "10.0.0.0/8:65536", "host:443"]
)
def test_parse_allow_refuses(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_allow(text)


def funding(account_id: str, vault_id: str) -> Event:
    vault = Address(bytes(20))
    payload = FundingReceived(Hash32(bytes(32)), Wei(1), vault, 1)
    return Event(Owner(account_id, vault_id), Observation(vault, 1, 1000, payload))


@pytest.mark.parametrize(
    ("change", "matched"),
    [
        ({}, True),
        ({"active": False}, False),
        ({"account_id": "b"}, False),
        ({"event_types": ("funding_received",)}, True),
        ({"event_types": ("withdrawal_claimed", "funding_received")}, True),
        ({"event_types": ("withdrawal_claimed",)}, False),
        ({"vault_ids": ("v1",)}, True),
        ({"vault_ids": ("v2",)}, False),
        ({"vault_ids": ("v1",), "event_types": ("withdrawal_claimed",)}, False),
        # a filter that lost its last vault matches nothing, never everything (E12)
        ({"vault_ids": ()}, False),
    ],
)
def test_matches(change: dict[str, Any], matched: bool) -> None:
    fields: dict[str, Any] = {
        "id": "w",
        "account_id": "a",
        "url": "https://example.com/",
        "event_types": None,
        "vault_ids": None,
        "active": True,
    }
    assert matches(Webhook(**(fields | change)), funding("a", "v1")) is matched


def test_filters_are_checked() -> None:
    assert check_event_types(None) is None
    assert check_event_types(EVENT_TYPES) == EVENT_TYPES
    assert check_event_types(["withdrawal_claimed", "funding_received", "withdrawal_claimed"]) == (
        "withdrawal_claimed",
        "funding_received",
    )
    assert check_vault_ids(None, {"v1"}) is None
    assert check_vault_ids(["v2", "v1", "v2"], {"v1", "v2"}) == ("v2", "v1")


def test_filters_that_match_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        check_event_types([])
    with pytest.raises(InputError, match="empty"):
        check_vault_ids([], {"v1"})
    with pytest.raises(InputError) as unknown:
        check_event_types(["funding_received", "Funding_Received"])
    assert all(name in str(unknown.value) for name in EVENT_TYPES)
    with pytest.raises(InputError, match="'v9'"):
        check_vault_ids(["v1", "v9"], {"v1"})
