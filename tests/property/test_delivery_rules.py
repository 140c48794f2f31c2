"""Delivery rules over generated inputs: retry verdicts, URLs, addresses, signatures, seals."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook
from yarl import URL

from vaultevents.core.errors import InputError
from vaultevents.core.retries import MAX_HINT_S, SCHEDULE_S, Exhausted, Outcome, Retry, judge, retry_after_s
from vaultevents.core.sealing import MasterKey, Secret, open_sealed, seal
from vaultevents.core.signing import delivery_headers, new_secret
from vaultevents.core.webhooks import AllowRule, UrlRules, check_url, is_denied, parse_network

pytestmark = pytest.mark.property

NOW = datetime(2026, 11, 6, tzinfo=UTC)
jitters = st.floats(0, 1, exclude_max=True)
failures = st.one_of(st.integers(300, 599).filter(lambda status: status != 410), st.none())
hints = st.one_of(
    st.none(),
    st.text(max_size=40),
    st.integers(-10, 10**12).map(str),
    st.integers(0, 2**32).map(lambda at_s: formatdate(at_s, usegmt=True)),
)


def test_the_schedule_adds_up() -> None:
    assert sum(SCHEDULE_S) == 272_105
    assert sum(SCHEDULE_S) * 1.2 <= timedelta(hours=90, minutes=42, seconds=6).total_seconds()
    assert list(SCHEDULE_S) == sorted(SCHEDULE_S)


@given(failures, st.integers(0, 10_000), jitters)
def test_without_a_hint_a_delay_is_the_schedule_and_0_to_20_percent(
    status: int | None, attempt_number: int, jitter: float
) -> None:
    verdict = judge(Outcome(status, "timeout"), attempt_number, SCHEDULE_S, jitter, NOW)
    if attempt_number > len(SCHEDULE_S):
        assert verdict == Exhausted()
    else:
        assert isinstance(verdict, Retry)
        delay = SCHEDULE_S[max(attempt_number - 1, 0)]
        assert delay <= verdict.after_s < delay * 1.2 * (1 + 1e-12)
        assert verdict.park_s == 0


@given(failures, st.integers(0, 10_000), jitters, hints)
def test_a_hint_only_ever_pushes_later_and_stays_finite(
    status: int | None, attempt_number: int, jitter: float, hint: str | None
) -> None:
    without = judge(Outcome(status), attempt_number, SCHEDULE_S, jitter, NOW)
    hinted = judge(Outcome(status, retry_after=hint), attempt_number, SCHEDULE_S, jitter, NOW)
    assert type(hinted) is type(without)
    assert isinstance(hinted, Retry | Exhausted)
    assert 0 <= hinted.park_s <= 86_400
    if isinstance(hinted, Retry) and isinstance(without, Retry):
        assert math.isfinite(hinted.after_s)
        assert hinted.after_s == max(without.after_s, hinted.park_s)


@given(st.integers(0, 86_400))
def test_a_date_is_as_good_as_its_seconds(seconds: int) -> None:
    assert retry_after_s(formatdate(NOW.timestamp() + seconds, usegmt=True), NOW) == min(seconds, MAX_HINT_S)


awkward = st.text(
    st.sampled_from("a\u00e91.0x7f:/@\\#?%[]-_~ \t\n\u017f\u212a\u3002\u2460\uff0e\uff11${}'\"<>|") | st.characters(),
    max_size=30,
)
shaped = st.builds(
    "https://{}{}{}".format,
    st.from_regex(r"[A-Za-z0-9.-]{1,30}", fullmatch=True) | awkward | st.ip_addresses().map(str),
    st.sampled_from(["", ":443", ":8443", ":80", ":0"]),
    st.from_regex(r"(/[a-zA-Z0-9%?&=@:.]{0,20})?", fullmatch=True) | awkward,
)


@given(awkward | shaped)
def test_what_is_accepted_reads_the_same_to_every_parser(text: str) -> None:
    rules = UrlRules()
    try:
        stored = check_url(text, rules)
    except InputError:
        return
    assert check_url(stored, rules) == stored
    assert stored.isascii()
    assert stored.isprintable()
    client, library = URL(stored, encoded=True), urlsplit(stored)
    assert client.raw_host == library.hostname
    assert client.port == (library.port or 443)
    assert client.port in rules.ports
    assert (client.user, client.password, client.raw_fragment) == (None, None, "")
    host = client.raw_host or ""
    if any(c == ":" for c in host) or host.replace(".", "").isdigit():
        assert not is_denied(ip_address(host))
    else:
        assert "." in host


@given(st.ip_addresses())
def test_a_literal_is_accepted_exactly_when_it_is_not_denied(ip: IPv4Address | IPv6Address) -> None:
    host = f"[{ip}]" if ip.version == 6 else str(ip)
    if is_denied(ip):
        with pytest.raises(InputError):
            check_url(f"https://{host}/", UrlRules())
    else:
        assert check_url(f"https://{host}/", UrlRules()) == f"https://{host}/"


@given(st.ip_addresses(v=4), st.sampled_from(["::ffff:0:0", "64:ff9b::"]))
def test_an_allowed_embedding_never_widens_what_ipv4_may_reach(ip: IPv4Address, prefix: str) -> None:
    outer = IPv6Address(int(IPv6Address(prefix)) | int(ip))
    rules = UrlRules(allow=(AllowRule(parse_network("::/0"), "any"),))
    assert rules.permits(outer, 443) == (not is_denied(ip))


@given(st.binary(min_size=32, max_size=32), st.from_regex(r"[A-Za-z0-9_-]{1,80}", fullmatch=True), st.text())
def test_the_published_library_accepts_every_signature(random_bytes: bytes, webhook_id: str, text: str) -> None:
    secret, body = new_secret(random_bytes), b'{"x":"' + text.encode("utf-8", "replace").hex().encode() + b'"}'
    headers = delivery_headers(
        secret_texts=[secret],
        webhook_id=webhook_id,
        timestamp_s=int(datetime.now(UTC).timestamp()),
        body=body,
        attempt_number=1,
        version="0",
    )
    Webhook(secret).verify(body, headers)


@given(
    st.binary(min_size=32, max_size=32), st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"))
)
def test_a_seal_opens_to_the_same_text(key: bytes, text: str, aad: str) -> None:
    master = MasterKey(key)
    assert open_sealed(master, seal(master, Secret(text), aad, bytes(12)), aad).reveal() == text
