"""Tokens of requests: every accepted form, every forged one, and what a developer is shown."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicNumbers, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from tokens_corpus import BODY, FORGED, GOLDEN, ORIGIN, Client, Sent, cached_key, quoted
from vaultevents.core.errors import ConfigError, InputError
from vaultevents.core.rsakeys import fingerprint, load_private_key, load_public_key, parse_public_key
from vaultevents.core.tokens import (
    Presented,
    TokenRejected,
    TokenRules,
    check_claims,
    parse_origin,
    read_token,
    replay_digest,
    sign_request,
    signed_by,
)

pytestmark = pytest.mark.unit

NOW_S = 1_800_000_000
RULES = TokenRules(origins=frozenset({ORIGIN}))
RECORDED: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("data/tokens/golden.json").read_text())


FERMAT_FACTORS = {
    5: (641,),
    6: (274177,),
    7: (59649589127497217,),
    8: (1238926361552897,),
    9: (2424833, 7455602825647884208337395736200454918783366342657),
    10: (45592577, 6487031809, 4659775785220018543264560743076778192897),
}


@cache
def client() -> Client:
    return Client(cached_key("own"), cached_key("stranger"), NOW_S)


def judge(sent: Sent, now_s: float = NOW_S, rules: TokenRules = RULES) -> None:
    """The three steps as a request meets them."""
    token = read_token(sent.token)
    if not signed_by(token, [client().key.public_key()]):
        raise TokenRejected("credentials_invalid", "")
    check_claims(token, Presented(sent.target, sent.body), now_s, rules)


def refusal(sent: Sent, now_s: float = NOW_S, rules: TokenRules = RULES) -> TokenRejected:
    with pytest.raises(TokenRejected) as refused:
        judge(sent, now_s, rules)
    return refused.value


def code_of(sent: Sent, rules: TokenRules = RULES) -> str:
    try:
        judge(sent, NOW_S, rules)
    except TokenRejected as refused:
        reported = str(refused)
        if refused.code != "credentials_invalid":
            assert 20 < len(reported) < 500
            assert reported.isascii() and reported.isprintable()
        return refused.code
    return "accepted"


def test_every_golden_token_is_accepted() -> None:
    codes = {case.name: code_of(case.make(client()), TokenRules(case.nonce_max, RULES.origins)) for case in GOLDEN}
    assert codes == dict.fromkeys(codes, "accepted")


@pytest.mark.parametrize("code", sorted({forged.code for forged in FORGED}))
def test_every_forged_token_is_refused_with_its_code(code: str) -> None:
    codes = {forged.name: code_of(forged.make(client())) for forged in FORGED if forged.code == code}
    assert codes == dict.fromkeys(codes, code)


def test_the_corpus_has_names_of_its_own_and_every_code() -> None:
    for table in (FORGED, GOLDEN):
        names = [case.name for case in table]
        assert len(names) == len(set(names))
    assert len(FORGED) >= 60
    assert {forged.code for forged in FORGED} == {
        "credentials_invalid",
        *(f"token_{code}" for code in ("malformed", "expired", "not_yet_valid")),
        *(f"token_{code}" for code in ("nonce_invalid", "url_mismatch", "body_mismatch")),
    }


@pytest.mark.parametrize(
    "case", RECORDED["cases"], ids=[f"{case['made_by']}, {case['name']}" for case in RECORDED["cases"]]
)
def test_a_token_made_by_another_library_is_accepted(case: dict[str, Any]) -> None:
    key = load_public_key(parse_public_key(RECORDED["public_key"].encode()))
    rules = TokenRules(case["nonce_max"], frozenset({RECORDED["origin"]}))
    token = read_token(case["token"])
    assert signed_by(token, [key])
    check_claims(token, Presented(case["target"], case["body"].encode()), RECORDED["now_s"], rules)
    with pytest.raises(TokenRejected):
        check_claims(token, Presented(case["target"], b'{"other":1}'), RECORDED["now_s"], rules)


@pytest.mark.parametrize(
    ("offset_s", "accepted"), [(-31, 0), (-30, 1), (-29, 1), (0, 1), (1, 1), (5, 1), (6, 0), (60, 0)]
)
def test_a_token_is_accepted_from_30_s_ago_to_5_s_ahead(offset_s: int, accepted: int) -> None:
    sent = client().get(iat=str(NOW_S + offset_s), exp=str(NOW_S + offset_s + 3600))
    if accepted:
        judge(sent)
    else:
        assert refusal(sent).code == ("token_expired" if offset_s < 0 else "token_not_yet_valid")


def test_the_bounds_hold_within_a_second_too() -> None:
    sent = client().get(exp=str(NOW_S + 30))
    judge(sent, NOW_S + 29.999)
    assert refusal(sent, NOW_S + 30.0).code == "token_expired"
    judge(sent, NOW_S - 5.0)
    assert refusal(sent, NOW_S - 5.001).code == "token_not_yet_valid"
    long = client().get(exp=str(NOW_S + 60))
    judge(long, NOW_S + 30.0)
    assert refusal(long, NOW_S + 30.001).code == "token_expired", "the leeway never extends the age"


def detail(sent: Sent, now_s: float = NOW_S) -> str:
    return str(refusal(sent, now_s))


def test_a_wrong_clock_is_reported_with_its_skew() -> None:
    slow = detail(client().get(), NOW_S + 47.25)
    assert "47.2 s ago" in slow and "2027-01-15T08:00:47.250+00:00" in slow
    fast = detail(client().get(), NOW_S - 60)
    assert "60.0 s in the future" in fast and "2027-01-15T07:59:00.000+00:00" in fast
    short = detail(client().get(exp=str(NOW_S + 2)), NOW_S + 10)
    assert "10.0 s ago" in short and "live 2 s" in short


def test_milliseconds_are_named() -> None:
    assert "use seconds" in detail(client().get(iat=f"{NOW_S}000", exp=f"{NOW_S}999"))


@pytest.mark.parametrize(
    ("claim", "text", "reported"),
    [
        ("iat", None, "claim iat is missing"),
        ("iat", '"1"', "claim iat is '1'"),
        ("exp", "1.5", "claim exp is 1.5"),
        ("exp", "true", "claim exp is true"),
        ("nonce", "100000", "claim nonce is 100000: use a random whole number from 0 to 99999"),
        ("nonce", "null", "claim nonce is null"),
        ("nonce", "{}", "claim nonce is an object"),
        ("nonce", "[]", "claim nonce is a list"),
        ("iat", "NaN", "the JSON holds NaN"),
        ("body", "5", "claim body is 5: sign the base64"),
    ],
)
def test_a_wrong_claim_is_named_with_its_value(claim: str, text: str | None, reported: str) -> None:
    assert reported in detail(client().get(**{claim: text}))


def test_a_url_mismatch_shows_both_sides_short_and_printable() -> None:
    reported = detail(client().get(url=quoted("/v1/acc\u00f6unt\x1b" + "x" * 500)))
    assert "'/v1/acc\\xf6unt\\x1bxxx" in reported and "x" * 200 not in reported
    assert repr(client().target) in reported
    assert "does not know itself by that origin" in detail(
        client().get(url=quoted("https://other.example" + client().path))
    )


def test_a_body_mismatch_says_which_side_is_wrong() -> None:
    for sent, reported in (
        (client().post(BODY), "claim body is missing"),
        (client().post(BODY, body='""'), "claim body is empty"),
        (client().post(BODY, body='"%"'), "not base64"),
        (client().post_signing(BODY, b'{"url":1}'), "another JSON value"),
        (client().post_signing(b"{}", b"{"), "the request body differs from claim body and cannot be read"),
        (client().post_signing(b"{", b"{}"), "claim body differs from the request body and cannot be read"),
        (client().get(body='"e30="'), "came without"),
    ):
        assert reported in detail(sent)


def test_only_configured_origins_count() -> None:
    absolute = client().get(url=quoted(ORIGIN + client().path))
    judge(absolute)
    assert refusal(absolute, rules=TokenRules()).code == "token_url_mismatch"
    local = TokenRules(origins=frozenset({parse_origin("http://127.0.0.1:8080"), parse_origin("https://[::1]:8443")}))
    judge(client().get(url=quoted("http://127.0.0.1:8080" + client().path)), rules=local)
    judge(client().get(url=quoted("https://[::1]:8443" + client().path)), rules=local)
    assert (
        refusal(client().get(url=quoted("http://127.0.0.1" + client().path)), rules=local).code == "token_url_mismatch"
    )


def test_a_request_line_in_absolute_form_matches_only_itself() -> None:
    whole = ORIGIN + client().target
    judge(Sent(client().get(url=quoted(whole)).token, whole))
    for signed in (client().path, client().target, ORIGIN + client().path, ORIGIN.upper() + client().target):
        assert refusal(Sent(client().get(url=quoted(signed)).token, whole)).code == "token_url_mismatch"
    assert refusal(Sent(client().get(url='"*"').token, "*")).code == "token_url_mismatch"


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://api.example.org", "https://api.example.org"),
        ("HTTPS://API.Example.org:443", "https://api.example.org"),
        ("https://api.example.org:8443", "https://api.example.org:8443"),
        ("http://127.0.0.1:80", "http://127.0.0.1"),
        ("http://[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_an_origin_is_kept_in_one_form(text: str, origin: str) -> None:
    assert parse_origin(text) == origin
    assert parse_origin(origin) == origin


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "api.example.org",
            "https://",
            "ftp://api.example.org",
            "https://api.example.org/",
            "https://a.example?x",
        ),
        *(
            "https://user@a.example",
            "https://a.example:0",
            "https://a.example:65536",
            "https://a.example:",
            "https://b\u00fccher.example",
        ),
        *("https://a.example\n", "https://a.example#x", "http\u017f://a.example"),
    ],
)
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"https://api\.example\.org"):
        parse_origin(text)


def test_any_of_several_keys_may_have_signed() -> None:
    token = read_token(client().get().token)
    own, other = client().key.public_key(), client().stranger.public_key()
    assert signed_by(token, [other, own])
    assert not signed_by(token, [other])
    assert not signed_by(token, [])


def test_the_key_that_stands_in_for_none_opens_nothing() -> None:
    """Its modulus 2^2048 - 1 is a product of Fermat numbers with known factors, so that anyone can sign for it."""
    modulus, exponent, totient = 2**2048 - 1, 65537, 1
    for power in range(11):
        rest = 2 ** (2**power) + 1
        for prime in FERMAT_FACTORS.get(power, ()):
            rest, remainder = divmod(rest, prime)
            assert remainder == 0
            totient *= prime - 1
        totient *= rest - 1
    good = read_token(client().get().token)
    digest = bytes.fromhex("3031300d060960864801650304020105000420") + hashlib.sha256(good.signing_input).digest()
    padded = b"\0\1" + b"\xff" * (256 - 3 - len(digest)) + b"\0" + digest
    signature = pow(int.from_bytes(padded, "big"), pow(exponent, -1, totient), modulus)
    forged = replace(good, signature=signature.to_bytes(256, "big"))
    assert signed_by(forged, [RSAPublicNumbers(exponent, modulus).public_key()]), "the negative control"
    assert not signed_by(forged, [])


def test_the_replay_digest_is_of_what_was_signed() -> None:
    one, other = read_token(client().get().token), read_token(client().get(nonce="4712").token)
    digests = {replay_digest("key-1", one), replay_digest("key-2", one), replay_digest("key-1", other)}
    assert len(digests) == 3
    assert replay_digest("key-1", read_token(client().get().token)) in digests, "RS256 is deterministic"
    assert all(len(digest) == 32 for digest in digests)


def test_a_token_does_not_print_itself() -> None:
    assert repr(read_token(client().get().token)) == "Token()"


def public_pem(key: RSAPrivateKey, form: PublicFormat = PublicFormat.SubjectPublicKeyInfo) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, form)


def private_pem(key: Any, encryption: KeySerializationEncryption | None = None) -> bytes:
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())
    return pem


def test_both_forms_of_a_public_key_are_one_key() -> None:
    key = client().key
    der = parse_public_key(public_pem(key))
    assert der == parse_public_key(public_pem(key, PublicFormat.PKCS1))
    assert der == parse_public_key(b"my key\r\n" + public_pem(key).replace(b"\n", b"\r\n") + b"\n")
    assert load_public_key(der).public_numbers() == key.public_key().public_numbers()
    assert re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", fingerprint(der))
    assert fingerprint(der) != fingerprint(parse_public_key(public_pem(client().stranger)))


def numbers_pem(exponent: int, modulus: int) -> bytes:
    return (
        RSAPublicNumbers(exponent, modulus).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )


def test_the_bounds_of_a_public_key() -> None:
    modulus = client().key.public_key().public_numbers().n
    parse_public_key(numbers_pem(3, modulus))
    parse_public_key(numbers_pem(65537, 2**8192 - 1))
    for exponent, number, reported in (
        (65537, 2**2047 - 1, "2047 bits"),
        (65537, 2**1024 - 1, "1024 bits"),
        (65537, 2**8193 - 1, "8193 bits"),
        (65537, modulus - 1, "unusual modulus"),
        (2**64 + 1, modulus, "unusual modulus or exponent"),
    ):
        with pytest.raises(InputError, match=reported):
            parse_public_key(numbers_pem(exponent, number))


def spki(exponent: bytes) -> bytes:
    """The client's key in PEM with the three bytes of its exponent replaced."""
    der = parse_public_key(public_pem(client().key))
    assert der.endswith(b"\x02\x03\x01\x00\x01")
    return b"-----BEGIN PUBLIC KEY-----\n%s-----END PUBLIC KEY-----\n" % base64.encodebytes(der[:-3] + exponent)


@pytest.mark.parametrize("exponent", [b"\x01\x00\x00", b"\x00\x00\x01", b"\x00\x00\x00", b"\xff\xff\xff"])
def test_an_exponent_that_is_even_or_1_is_refused(exponent: bytes) -> None:
    parse_public_key(spki(b"\x01\x00\x01"))
    with pytest.raises(InputError, match="openssl"):
        parse_public_key(spki(exponent))


def test_what_is_no_rsa_public_key_is_refused_with_advice() -> None:
    key = client().key
    curve = ec.generate_private_key(ec.SECP256R1())
    for pem, reported in (
        (private_pem(key), "never leave its owner"),
        (private_pem(curve), "never leave its owner"),
        (public_pem(key) + private_pem(key), "never leave its owner"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "openssl x509"),
        (curve.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), "not RSA"),
        (public_pem(key) * 2, "exactly one public key"),
        (b"", "exactly one public key"),
        (b"ssh-rsa AAAAB3NzaC1yc2E= me@host", "exactly one public key"),
        (parse_public_key(public_pem(key)), "exactly one public key"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "damaged"),
        (public_pem(key)[:-40], "damaged"),
    ):
        with pytest.raises(InputError, match=reported):
            parse_public_key(pem)


def test_a_stored_key_that_is_not_rsa_is_a_bug() -> None:
    curve = ec.generate_private_key(ec.SECP256R1()).public_key()
    with pytest.raises(ValueError, match="not an RSA key"):
        load_public_key(curve.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def test_a_private_key_loads_or_says_what_to_do() -> None:
    key = client().key
    assert load_private_key(private_pem(key)).private_numbers() == key.private_numbers()
    for pem, reported in (
        (private_pem(key, BestAvailableEncryption(b"x")), "decrypt a copy"),
        (private_pem(ed25519.Ed25519PrivateKey.generate()), "not RSA"),
        (private_pem(generate_private_key(65537, 1024)), "1024 bits"),
        (public_pem(key), "not a private key"),
        (b"", "not a private key"),
    ):
        with pytest.raises(InputError, match=reported):
            load_private_key(pem)


@pytest.mark.parametrize(
    ("target", "body"), [("/v1/account", b""), ("/v1/account/webhooks?limit=2", b""), ("/v1/x", BODY)]
)
def test_what_we_sign_is_accepted(target: str, body: bytes) -> None:
    token = sign_request(client().key, target=target, body=body, now_s=NOW_S + 0.9, nonce=99_999)
    judge(Sent(token, target, body), NOW_S + 0.9)
    judge(Sent(token, target, body), NOW_S + 29.9)
    assert refusal(Sent(token, target, body), NOW_S + 30.0).code == "token_expired"
    assert refusal(Sent(token, target, body + b"1")).code == "token_body_mismatch"
    assert refusal(Sent(token, target + "/", body)).code == "token_url_mismatch"
