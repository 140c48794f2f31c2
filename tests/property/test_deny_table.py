"""The deny table at each edge of each range, against the networks that the corpus lists (rule T1)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssrf_corpus import DENIED_NETWORKS
from vaultevents.core.webhooks import AllowRule, UrlRules, is_denied, parse_network

pytestmark = pytest.mark.property

ALLOCATED = IPv6Network("2000::/3")
PUBLIC = UrlRules()
inside = st.sampled_from(DENIED_NETWORKS).flatmap(lambda network: st.ip_addresses(network=network))


def near_an_edge(network: IPv4Network | IPv6Network, last: bool, offset: int) -> IPv4Address | IPv6Address:
    """The address `offset` after the network's first or last one, going round at the ends of all addresses."""
    edge = int(network[-1] if last else network[0]) + offset
    return IPv4Address(edge % 2**32) if isinstance(network, IPv4Network) else IPv6Address(edge % 2**128)


def should_be_denied(ip: IPv4Address | IPv6Address) -> bool:
    unallocated = isinstance(ip, IPv6Address) and ip not in ALLOCATED
    return unallocated or any(ip in network for network in DENIED_NETWORKS)


@given(inside)
def test_all_of_a_denied_network_is_denied(ip: IPv4Address | IPv6Address) -> None:
    assert is_denied(ip)
    assert not PUBLIC.permits(ip, 443)


@pytest.mark.parametrize("network", DENIED_NETWORKS, ids=str)
def test_the_edges_of_a_network_belong_to_it(network: IPv4Network | IPv6Network) -> None:
    for last in (False, True):
        assert is_denied(near_an_edge(network, last, 0))


@given(st.sampled_from(DENIED_NETWORKS), st.booleans(), st.integers(-300, 300))
def test_just_outside_a_network_only_other_rows_deny(
    network: IPv4Network | IPv6Network, last: bool, offset: int
) -> None:
    ip = near_an_edge(network, last, offset)
    assert is_denied(ip) == should_be_denied(ip)


@given(st.ip_addresses())
def test_nothing_else_is_denied(ip: IPv4Address | IPv6Address) -> None:
    assert is_denied(ip) == should_be_denied(ip)


@given(st.sampled_from(DENIED_NETWORKS), st.sampled_from([443, 8443, 80, 22]))
def test_an_allowed_network_opens_no_other(network: IPv4Network | IPv6Network, port: int) -> None:
    rules = UrlRules(allow=(AllowRule(parse_network(str(network)), 8443),))
    for other in DENIED_NETWORKS:
        ip = other[1] if other.num_addresses > 1 else other[0]
        if ip not in network:
            assert not rules.permits(ip, port), other


@given(inside, st.sampled_from(["", "%eth0", "%1"]))
def test_a_zone_changes_no_verdict(ip: IPv4Address | IPv6Address, zone: str) -> None:
    if isinstance(ip, IPv6Address):
        assert is_denied(ip_address(f"{ip}{zone}"))
