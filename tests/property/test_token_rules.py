"""Authentication rules over generated inputs: nothing but the request that was signed gets through."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from functools import cache
from typing import Any, cast

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tokens_corpus import GOLDEN, ORIGIN, Client, Golden, Sent, base64url, cached_key, quoted
from vaultevents.core.errors import ConfigError, InputError
from vaultevents.core.jsonbody import JsonMalformed, JsonValue, parse_json, same_value
from vaultevents.core.rsakeys import parse_public_key
from vaultevents.core.sealing import Secret
from vaultevents.core.tokens import (
    Presented,
    Token,
    TokenRejected,
    TokenRules,
    check_claims,
    parse_origin,
    read_token,
    replay_digest,
    sign_request,
    signed_by,
)
from vaultevents.core.totp import lock_s, matching_step, new_seed

pytestmark = pytest.mark.property

NOW_S = 1_800_000_000
RULES = TokenRules(origins=frozenset({ORIGIN}))
CODES = {
    *("token_malformed", "token_expired", "token_not_yet_valid"),
    *("token_url_mismatch", "token_body_mismatch", "token_nonce_invalid"),
}

numbers = st.integers(-(10**20), 10**20) | st.decimals(allow_nan=False, allow_infinity=False, places=3)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
json_like = st.text(st.sampled_from('{}[],:"\\ud8eE0123456789.+-truefalsn \n\u00e9') | st.characters(), max_size=60)
raw_bytes = st.binary(max_size=60) | json_like.map(lambda text: text.encode("utf-8", "surrogatepass"))


@cache
def client() -> Client:
    return Client(cached_key("own"), cached_key("stranger"), NOW_S)


def written(value: JsonValue, indent: int | None = None) -> str:
    """JSON text of a parsed value, its decimals digit by digit."""
    if isinstance(value, Decimal):
        return f"{value:f}" + ("" if "." in f"{value:f}" else ".0")
    if isinstance(value, dict):
        return "{" + " ,".join(f"{quoted(name)}: {written(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def verdict(token: Token, presented: Presented, rules: TokenRules = RULES, now_s: float = NOW_S) -> str:
    try:
        check_claims(token, presented, now_s, rules)
    except TokenRejected as refused:
        assert refused.code in CODES
        assert len(str(refused)) < 700
        assert str(refused).isascii() and str(refused).isprintable()
        return refused.code
    return "accepted"


def unsigned(claims: dict[str, Any]) -> Token:
    return Token(b"", b"", written(claims).encode())


@given(raw_bytes)
@example(b"[" * 100_000)
@example(b'"\\ud800')
def test_any_bytes_are_json_or_malformed(raw: bytes) -> None:
    try:
        value = parse_json(raw)
    except JsonMalformed:
        return
    assert same_value(value, value)
    json.loads(raw)  # whatever we accept, the standard library accepts


@given(values)
def test_a_written_value_reads_back(value: JsonValue) -> None:
    assert same_value(parse_json(written(value).encode()), value)


@given(values, values, values)
def test_the_same_value_is_an_equivalence(one: JsonValue, two: JsonValue, three: JsonValue) -> None:
    assert same_value(one, one)
    assert same_value(one, two) == same_value(two, one)
    if same_value(one, two) and same_value(two, three):
        assert same_value(one, three)


spellings = st.sampled_from(
    ["1", "1.0", "1e0", "10e-1", "true", "0", "-0", "0.0", "false", "null", '"1"', "[1]", '{"a":1}', "[1.0]"]
)


@given(spellings, spellings, spellings)
def test_the_same_value_is_an_equivalence_of_spellings_too(one: str, two: str, three: str) -> None:
    a, b, c = (parse_json(text.encode()) for text in (one, two, three))
    assert same_value(a, b) == same_value(b, a)
    assert not (same_value(a, b) and same_value(b, c)) or same_value(a, c)


@given(st.text(max_size=80) | st.text(st.sampled_from("eyJ.AQgw-_= \n"), max_size=80))
def test_any_text_is_a_token_or_malformed(text: str) -> None:
    try:
        token = read_token(text)
    except TokenRejected as refused:
        assert refused.code == "token_malformed"
        return
    assert b".".join((token.signing_input, base64url(token.signature).encode())) == text.encode()
    assert not signed_by(token, [client().key.public_key()])


@given(raw_bytes, st.text(max_size=20), st.binary(max_size=20))
def test_any_payload_is_judged(payload: bytes, target: str, body: bytes) -> None:
    assert verdict(Token(b"", b"", payload), Presented(target, body)) != "accepted"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "iat": st.integers(NOW_S - 40, NOW_S + 10) | values,
            "exp": st.integers(NOW_S - 5, NOW_S + 90) | values,
            "nonce": st.integers(-2, 100_002) | values,
            "url": st.sampled_from(["/v1/x", "/v1/x?y", ORIGIN + "/v1/x", "/v1/y"]) | values,
            "body": st.sampled_from(["", "IiI=", "e30", "e30=", "eyB9"]) | values,
        },
    ),
    st.sampled_from([b"", b"{}", b"{ }", b"[]"]),
    st.floats(0, 1, exclude_max=True),
)
def test_what_is_accepted_keeps_every_rule(claims: dict[str, Any], body: bytes, fraction: float) -> None:
    """Against a second reading of the rules, over claims that are mostly near the bounds."""
    now_s = NOW_S + fraction
    iat, exp, nonce = (cast("int", claims.get(name)) for name in ("iat", "exp", "nonce"))
    fresh = (
        (type(iat), type(exp), type(nonce)) == (int, int, int)
        and now_s - 30 <= iat <= now_s + 5
        and exp > max(iat, now_s)
        and 0 <= nonce <= 99_999
    )
    right_url = claims.get("url") in ["/v1/x", "/v1/x?y", ORIGIN + "/v1/x"]
    signed = {
        b"": ["", "IiI=", "IiI"],
        b"{}": ["e30", "e30=", "eyB9"],
        b"{ }": ["e30", "e30=", "eyB9"],
        b"[]": ["W10", "W10="],
    }
    right_body = claims["body"] in signed[body] if "body" in claims else not body
    code = verdict(unsigned(claims), Presented("/v1/x?y", body), now_s=now_s)
    assert (code == "accepted") == (fresh and right_url and right_body)


@given(st.sampled_from(GOLDEN), st.data())
def test_a_golden_token_with_one_changed_character_is_refused(golden: Golden, data: st.DataObject) -> None:
    sent: Sent = golden.make(client())
    position = data.draw(st.integers(0, len(sent.token) - 1))
    other = data.draw(st.sampled_from("ABCQgwxyz019-_.=+/ \n"))
    assume(sent.token[position] != other)
    try:
        token = read_token(sent.token[:position] + other + sent.token[position + 1 :])
    except TokenRejected as refused:
        assert refused.code == "token_malformed"
        return
    assert not signed_by(token, [client().key.public_key()])


@given(st.sampled_from(GOLDEN), st.sampled_from(["iat", "exp", "nonce", "url", "body"]), values)
def test_a_golden_token_with_one_changed_claim_is_refused_or_within_the_rules(
    golden: Golden, name: str, value: Any
) -> None:
    sent: Sent = golden.make(client())
    rules = TokenRules(golden.nonce_max, RULES.origins)
    claims = parse_json(read_token(sent.token).payload)
    assert isinstance(claims, dict)
    assume(type(value) is not type(claims.get(name, "")) or not same_value(value, claims.get(name, "")))
    whole = value if type(value) is int else None
    within = whole is not None and (
        (name == "exp" and whole > NOW_S and whole > cast("int", claims["iat"]))
        or (name == "nonce" and 0 <= whole <= golden.nonce_max)
    )
    code = verdict(unsigned(claims | {name: value}), Presented(sent.target, sent.body), rules)
    assert (code == "accepted") == within


@given(
    values.filter(lambda value: isinstance(value, dict)),
    st.binary(min_size=1, max_size=40) | json_like.map(lambda t: t.encode("utf-8", "replace")),
)
def test_another_body_is_accepted_only_as_the_same_value(signed: JsonValue, sent: bytes) -> None:
    signed_bytes = written(signed).encode()
    token = read_token(sign_request(client().key, target="/v1/x", body=signed_bytes, now_s=NOW_S, nonce=0))
    assert verdict(token, Presented("/v1/x", signed_bytes)) == "accepted"
    assert verdict(token, Presented("/v1/x", b" " + signed_bytes + b"\r\n")) == "accepted"
    try:
        same = sent == signed_bytes or same_value(parse_json(sent), signed)
    except JsonMalformed:
        same = False
    assert (verdict(token, Presented("/v1/x", sent)) == "accepted") == same
    assert verdict(token, Presented("/v1/x", b"")) == "token_body_mismatch"


urlish = st.text(st.sampled_from("/v1.%2Ff?&=;#@:\\ aA\u00e9\u017f"), max_size=12)


@given(urlish, urlish, st.sampled_from(["", ORIGIN, "https://other.example", "//"]))
def test_a_url_is_accepted_only_as_the_very_text(target: str, claim: str, prefix: str) -> None:
    target = "/" + target
    claims = {"iat": NOW_S, "exp": NOW_S + 30, "nonce": 0, "url": prefix + claim}
    path = target.partition("?")[0]
    right = prefix + claim in {target, path, ORIGIN + target, ORIGIN + path} and "#" not in target
    assert (verdict(unsigned(claims), Presented(target, b"")) == "accepted") == right


@given(urlish)
def test_every_target_can_be_signed(rest: str) -> None:
    target = "/v1" + rest.replace("#", "")
    path = target.partition("?")[0]
    for claim in (target, path, ORIGIN + target, ORIGIN + path):
        claims = {"iat": NOW_S, "exp": NOW_S + 30, "nonce": 0, "url": claim}
        assert verdict(unsigned(claims), Presented(target, b"")) == "accepted"


@given(st.text(max_size=40) | urlish.map(lambda text: "https://" + text))
def test_an_origin_is_canonical_or_refused(text: str) -> None:
    try:
        origin = parse_origin(text)
    except ConfigError:
        return
    assert parse_origin(origin) == origin == origin.lower()


@given(
    st.binary(max_size=200)
    | st.binary(max_size=60).map(lambda data: b"-----BEGIN PUBLIC KEY-----\n" + data + b"\n-----END PUBLIC KEY-----")
)
def test_any_bytes_are_a_public_key_or_refused(pem: bytes) -> None:
    with pytest.raises(InputError):
        parse_public_key(pem)


@given(st.text(max_size=8), st.binary(max_size=8), st.binary(max_size=8))
def test_replay_digests_are_apart(api_key_id: str, one: bytes, other: bytes) -> None:
    api_key_id = api_key_id.encode("utf-8", "replace").decode()
    token = Token(one, b"", b"")
    assert (replay_digest(api_key_id, token) == replay_digest(api_key_id, replace(token, signing_input=other))) == (
        one == other
    )
    assert replay_digest(api_key_id, token) == replay_digest(api_key_id, replace(token, signature=other))


@given(
    st.binary(min_size=20, max_size=20),
    st.text(max_size=8) | st.from_regex(r"[0-9]{6}", fullmatch=True),
    st.floats(60, 10**10),
)
def test_a_matching_step_is_near(random_bytes: bytes, code: str, now_s: float) -> None:
    seed: Secret = new_seed(random_bytes)
    step = matching_step(seed, code, now_s)
    assert step is None or abs(step - now_s // 30) <= 1


@given(st.integers(0, 200))
def test_locks_never_get_shorter(failures: int) -> None:
    here, later = lock_s(failures), lock_s(failures + 3)
    assert later is None or 900 <= (here or 900) <= later <= 86_400
    assert here is None or later is not None
