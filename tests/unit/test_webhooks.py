"""Filters, the URL parser and the deny table, against the tables of the SSRF rules."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from ssrf_corpus import ACCEPTED_URLS, DENIED_ADDRESSES, PUBLIC_ADDRESSES, REFUSED_URLS, RULE_TEXTS
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
    is_denied,
    matches,
    parse_allow,
    parse_network,
)

pytestmark = pytest.mark.unit

RULES = UrlRules()


@pytest.mark.parametrize("text", DENIED_ADDRESSES)
def test_denied(text: str) -> None:
    ip = ip_address(text)
    assert is_denied(ip)
    assert not RULES.permits(ip, 443)


@pytest.mark.parametrize("text", PUBLIC_ADDRESSES)
def test_neighbours_of_denied_ranges_pass(text: str) -> None:
    ip = ip_address(text)
    assert not is_denied(ip)
    assert RULES.permits(ip, 443)
    assert not RULES.permits(ip, 80)


def test_the_table_does_more_than_the_standard_library() -> None:
    passed_by_is_global = [text for text in DENIED_ADDRESSES if ip_address(text).is_global]
    assert passed_by_is_global, "the own table would not be needed"


def test_there_are_enough_vectors() -> None:
    assert len(REFUSED_URLS) >= 250
    assert len(DENIED_ADDRESSES) >= 90
    assert len(PUBLIC_ADDRESSES) >= 40
    assert set(REFUSED_URLS.values()) == RULE_TEXTS.keys(), "each rule is met"


@pytest.mark.parametrize(("text", "rule"), REFUSED_URLS.items())
def test_refused_url(text: str, rule: str) -> None:
    with pytest.raises(InputError) as refused:
        check_url(text, RULES)
    assert RULE_TEXTS[rule] in str(refused.value)


@pytest.mark.parametrize(("text", "stored"), ACCEPTED_URLS.items())
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
        # a filter that lost its last vault matches nothing, never everything (rule E12)
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


def test_filters_that_match_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        check_event_types([])
    with pytest.raises(InputError) as unknown:
        check_event_types(["funding_received", "Funding_Received"])
    assert all(name in str(unknown.value) for name in EVENT_TYPES)
