"""Tokens that must be accepted and tokens that must be refused, as tables over a key, a clock, a target and a body.

The tokens are put together from bytes here, without the code under test. Claims are given as JSON text, so that a table
can say `NaN`, `1.0` or a name twice. The same tables judge the pure rules and, on a live clock, the service itself.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512, HashAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

ORIGIN = "https://api.example.org"  # what the service under test is to know itself by
HEADER = b'{"alg":"RS256","typ":"JWT"}'
BODY = (
    '{"url":"https://hooks.example.org/caf\u00e9","eventTypes":["funding_received","validator_exited"],'
    '"stakingVaultIds":null,"active":true}'
).encode()

Sign = Callable[[RSAPrivateKey, bytes], bytes]


@cache
def cached_key(name: str) -> RSAPrivateKey:
    """One RSA key of 2048 bits per name and test session."""
    return generate_private_key(65537, 2048)


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def rsa_with(digest: HashAlgorithm) -> Sign:
    return lambda key, signing_input: key.sign(signing_input, padding.PKCS1v15(), digest)


rs256 = rsa_with(SHA256())


def pss(key: RSAPrivateKey, signing_input: bytes) -> bytes:
    return key.sign(signing_input, padding.PSS(padding.MGF1(SHA256()), 32), SHA256())


def hmac_with_public_key(encoding: Encoding) -> Sign:
    def sign(key: RSAPrivateKey, signing_input: bytes) -> bytes:
        public = key.public_key().public_bytes(encoding, PublicFormat.SubjectPublicKeyInfo)
        return hmac.digest(public, signing_input, "sha256")

    return sign


def es256(_: RSAPrivateKey, signing_input: bytes) -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).sign(signing_input, ec.ECDSA(SHA256()))


def quoted(text: str) -> str:
    """A JSON text."""
    return json.dumps(text)


def encoded(body: bytes) -> str:
    """A body claim: standard base64 as a JSON text."""
    return quoted(base64.b64encode(body).decode())


@dataclass(frozen=True, slots=True)
class Sent:
    """What goes over the wire. With a body it is a POST, without a GET."""

    token: str
    target: str
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Client:
    """Who sends: the owner of `key`. `stranger` is a key that its API key has not: another account's, a retired one.

    `target` is that of a GET, with a query; `body` is a JSON object that can be posted to the same path.
    """

    key: RSAPrivateKey
    stranger: RSAPrivateKey
    now_s: int
    target: str = "/v1/account/webhooks?limit=2"
    body: bytes = BODY

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def claims(self, changes: dict[str, str | None]) -> bytes:
        """The payload with claims replaced, added or (`None`) left out, each given as JSON text."""
        claims: dict[str, str | None] = {
            "iat": str(self.now_s),
            "exp": str(self.now_s + 30),
            "nonce": "4711",
            "url": quoted(self.path),
        }
        claims |= changes
        return ("{" + ",".join(f"{quoted(name)}:{value}" for name, value in claims.items() if value) + "}").encode()

    def compact(self, header: bytes, payload: str, sign: Sign = rs256) -> str:
        signing_input = f"{base64url(header)}.{payload}"
        return f"{signing_input}.{base64url(sign(self.key, signing_input.encode()))}"

    def get(self, **changes: str | None) -> Sent:
        return Sent(self.compact(HEADER, base64url(self.claims(changes))), self.target)

    def get_with(self, *, header: bytes = HEADER, payload: bytes | None = None, sign: Sign = rs256) -> Sent:
        payload = self.claims({}) if payload is None else payload
        return Sent(self.compact(header, base64url(payload), sign), self.target)

    def post(self, sent: bytes, **changes: str | None) -> Sent:
        """`sent` as the body; what is signed for it is the claim `body` among the changes."""
        return Sent(self.get(**changes).token, self.path, sent)

    def post_signing(self, signed: bytes, sent: bytes) -> Sent:
        return self.post(sent, body=encoded(signed))

    def value(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value


Make = Callable[[Client], Sent]
Words = Callable[[Client], str]


@dataclass(frozen=True, slots=True)
class Forged:
    """A request that must be refused with `code`.

    `on_wire` is false for what no HTTP client can put into a header; `exact_clock` needs a clock that stands still.
    """

    name: str
    code: str
    make: Make
    on_wire: bool = True
    exact_clock: bool = False


@dataclass(frozen=True, slots=True)
class Golden:
    """A request whose token must be accepted under `nonce_max`; whether its body makes sense is another matter."""

    name: str
    make: Make
    nonce_max: int = 99_999
    exact_clock: bool = False


def header(text: bytes, sign: Sign = rs256) -> Make:
    return lambda client: client.get_with(header=text, sign=sign)


def signature(sign: Sign) -> Make:
    return lambda client: client.get_with(sign=sign)


def claim(name: str, text: str | None) -> Make:
    """A GET with one claim replaced by this JSON text, or left out."""
    return lambda client: client.get(**{name: text})


def seconds(name: str, offset_s: int) -> Make:
    return lambda client: client.get(**{name: str(client.now_s + offset_s)})


def issued(offset_s: int) -> Make:
    """A GET whose `iat` is so many seconds from now, and `exp` a minute later."""
    return lambda client: client.get(iat=str(client.now_s + offset_s), exp=str(client.now_s + offset_s + 60))


def url(words: Words) -> Make:
    return lambda client: client.get(url=quoted(words(client)))


def target(words: Words, signed: Words = lambda client: client.path) -> Make:
    return lambda client: Sent(client.get(url=quoted(signed(client))).token, words(client))


def token(change: Callable[[str], str]) -> Make:
    """A good GET whose token text was altered on the way."""
    return lambda client: Sent(change(client.get().token), client.target)


def body_claim(text: str | None) -> Make:
    """The client's body, with this JSON text as the claim."""
    return lambda client: client.post(client.body, body=text)


def body_words(words: Callable[[bytes], str]) -> Make:
    return lambda client: client.post(client.body, body=quoted(words(client.body)))


def lone_body(sent: bytes, text: str) -> Make:
    """`sent` as the body, with this JSON text as the claim."""
    return lambda client: client.post(sent, body=text)


def bodies(signed: bytes, sent: bytes) -> Make:
    return lambda client: client.post_signing(signed, sent)


def with_key_header(name: str, value: Callable[[Client], object]) -> Make:
    """A token by the stranger whose header offers the stranger's key, or where to find it."""

    def make(client: Client) -> Sent:
        header = json.dumps({"alg": "RS256", name: value(client)}).encode()
        return client.get_with(header=header, sign=lambda _, signing_input: rs256(client.stranger, signing_input))

    return make


def jwk(client: Client) -> dict[str, str]:
    numbers = client.stranger.public_key().public_numbers()
    modulus = base64url(numbers.n.to_bytes((numbers.n.bit_length() + 7) // 8, "big"))
    return {"kty": "RSA", "e": "AQAB", "n": modulus, "alg": "RS256"}


def x5c(client: Client) -> list[str]:
    der = client.stranger.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return [base64.b64encode(der).decode()]


def next_digit(text: str) -> str:
    """`text` with the last base64url character one further: the same bytes, where it carries unused bits."""
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    return text[:-1] + digits[digits.index(text[-1]) + 1]


def payload_with_unused_bits(client: Client) -> Sent:
    payload = client.claims({})
    payload += b" " * ((1 - len(payload)) % 3)  # one byte in the last group leaves four bits unused
    return Sent(client.compact(HEADER, next_digit(base64url(payload))), client.target)


def standard_alphabet(client: Client) -> Sent:
    payload = base64.b64encode(client.claims({"x": '"???>>>"'})).decode().rstrip("=")
    assert "/" in payload or "+" in payload
    return Sent(client.compact(HEADER, payload), client.target)


def json_serialisation(client: Client) -> Sent:
    header, payload, signature = client.get().token.split(".")
    return Sent(json.dumps({"protected": header, "payload": payload, "signature": signature}), client.target)


def twice(client: Client, name: str, value: str) -> Sent:
    return client.get_with(payload=client.claims({})[:-1] + f",{quoted(name)}:{value}}}".encode())


MALFORMED = "token_malformed"
INVALID = "credentials_invalid"
EXPIRED = "token_expired"
EARLY = "token_not_yet_valid"
NONCE = "token_nonce_invalid"
URL = "token_url_mismatch"
BODY_CODE = "token_body_mismatch"

_ALGORITHM = [
    *(
        Forged(f"alg {json.dumps(alg)}", MALFORMED, header(json.dumps({"alg": alg}).encode()))
        for alg in ("none", "None", "NONE", "nOnE", "rs256", " RS256", "", None, 256, ["RS256"])
    ),
    Forged("alg none and no signature", MALFORMED, header(b'{"alg":"none"}', lambda *_: b"")),
    Forged("alg missing", MALFORMED, header(b'{"typ":"JWT"}')),
    Forged("empty signature", MALFORMED, signature(lambda *_: b"")),
    *(
        Forged(name, MALFORMED, header(b'{"alg":"%s"}' % alg, sign))
        for name, alg, sign in (
            ("HS256 keyed with the PEM", b"HS256", hmac_with_public_key(Encoding.PEM)),
            ("HS256 keyed with the DER", b"HS256", hmac_with_public_key(Encoding.DER)),
            ("PS256", b"PS256", pss),
            ("RS384", b"RS384", rsa_with(SHA384())),
            ("RS512", b"RS512", rsa_with(SHA512())),
            ("ES256", b"ES256", es256),
        )
    ),
    Forged("HS256 under an RS256 header", INVALID, signature(hmac_with_public_key(Encoding.PEM))),
    Forged("PS256 under an RS256 header", INVALID, signature(pss)),
    Forged("RS512 under an RS256 header", INVALID, signature(rsa_with(SHA512()))),
    Forged("a digest for a signature", INVALID, signature(lambda _, text: hashlib.sha256(text).digest())),
    Forged("crit", MALFORMED, header(b'{"alg":"RS256","crit":["exp"],"exp":1}')),
    Forged("b64 false", MALFORMED, header(b'{"alg":"RS256","b64":false}')),
    Forged("b64 false and crit", MALFORMED, header(b'{"alg":"RS256","b64":false,"crit":["b64"]}')),
]

_KEY_CHOICE = [
    Forged("another account's or a retired key", INVALID, with_key_header("typ", lambda _: "JWT")),
    Forged("stranger's jwk", INVALID, with_key_header("jwk", jwk)),
    Forged("stranger's jku", INVALID, with_key_header("jku", lambda _: "https://keys.example.com/jwks.json")),
    Forged("stranger's x5c", INVALID, with_key_header("x5c", x5c)),
    Forged("stranger's x5u", INVALID, with_key_header("x5u", lambda _: "https://keys.example.com/chain.pem")),
    Forged("kid with a path", INVALID, with_key_header("kid", lambda _: "../../../../dev/null")),
    Forged("kid with SQL", INVALID, with_key_header("kid", lambda _: "x' union select 'key' --")),
]


def other_payload(client: Client) -> Sent:
    """Another request's payload under a good signature."""
    header, _, signature = client.get().token.split(".")
    return Sent(f"{header}.{base64url(client.claims({'nonce': '4712'}))}.{signature}", client.target)


_ENCODING = [
    Forged("padding appended", MALFORMED, token(lambda token: token + "==")),
    Forged("one padding character", MALFORMED, token(lambda token: token + "=")),
    Forged("inner space", MALFORMED, token(lambda token: token[:50] + " " + token[50:])),
    Forged("inner tab", MALFORMED, token(lambda token: token[:50] + "\t" + token[50:])),
    Forged("inner newline", MALFORMED, token(lambda token: token[:50] + "\n" + token[50:]), False),
    Forged("final newline", MALFORMED, token(lambda token: token + "\n"), on_wire=False),
    Forged("unused bits in the signature", MALFORMED, token(next_digit)),
    Forged("unused bits in the payload", MALFORMED, payload_with_unused_bits),
    Forged("standard alphabet", MALFORMED, standard_alphabet),
    Forged("a letter outside ASCII", MALFORMED, token(lambda token: token + "\u00e9")),
    Forged("a lone character in the last group", MALFORMED, token(lambda token: token + "AAA")),
    Forged("another payload", INVALID, other_payload),
    Forged("nothing", MALFORMED, token(lambda _: ""), on_wire=False),
    Forged("one part", MALFORMED, token(lambda token: token.replace(".", ""))),
    Forged("two parts", MALFORMED, token(lambda token: token.rpartition(".")[0])),
    Forged("four parts", MALFORMED, token(lambda token: token + ".AAAA")),
    Forged("five parts", MALFORMED, token(lambda token: token + ".AAAA.AAAA")),
    Forged("three empty parts", MALFORMED, token(lambda _: "..")),
    Forged("JSON serialisation", MALFORMED, json_serialisation),
    Forged("more than 64 KiB", MALFORMED, lambda c: c.get(x=quoted("x" * 50_000)), on_wire=False),
    Forged("a name twice in the header", MALFORMED, header(b'{"alg":"none","alg":"RS256"}')),
    Forged("an escaped name twice", MALFORMED, header(b'{"alg":"RS256","\\u0061lg":"RS256"}')),
    Forged("header is an array", MALFORMED, header(b'["RS256"]')),
    Forged("header is not JSON", MALFORMED, header(b"RS256")),
    Forged("header with a byte order mark", MALFORMED, header(b"\xef\xbb\xbf" + HEADER)),
    Forged("deep header", MALFORMED, header(b'{"alg":"RS256","x":' + b"[" * 40 + b"]" * 40 + b"}")),
    Forged("iat twice", MALFORMED, lambda c: twice(c, "iat", str(c.now_s))),
    Forged("url twice", MALFORMED, lambda c: twice(c, "url", quoted(c.path))),
    Forged("a name twice in an unknown claim", MALFORMED, lambda c: c.get(x='{"a":1,"a":1}')),
    Forged("payload is an array", MALFORMED, lambda c: c.get_with(payload=b"[" + c.claims({}) + b"]")),
    Forged("payload is a text", MALFORMED, lambda c: c.get_with(payload=b'"iat"')),
    Forged("payload is not JSON", MALFORMED, lambda c: c.get_with(payload=c.claims({}) + b",")),
    Forged(
        "payload is not UTF-8", MALFORMED, lambda c: c.get_with(payload=c.claims({"x": '"?"'}).replace(b"?", b"\xe9"))
    ),
    Forged("payload with a byte order mark", MALFORMED, lambda c: c.get_with(payload=b"\xef\xbb\xbf" + c.claims({}))),
    Forged("deep nesting", MALFORMED, lambda c: c.get(x="[" * 5_000 + "]" * 5_000)),
    Forged("a lone surrogate", MALFORMED, lambda c: c.get(x='"\\ud800"')),
    Forged("an unknown claim NaN", MALFORMED, lambda c: c.get(x="NaN")),
]

_TIME = [
    *(
        Forged(f"{time} {name}", MALFORMED, claim(time, text))
        for time in ("iat", "exp")
        for name, text in (
            ("missing", None),
            ("null", "null"),
            ("text", '"1700000000"'),
            ("true", "true"),
            ("1.5", "1.5"),
            ("a whole number with a fraction", "1700000000.0"),
            ("an exponent", "17e8"),
            ("NaN", "NaN"),
            ("Infinity", "Infinity"),
            ("-Infinity", "-Infinity"),
            ("1e400", "1e400"),
            ("1e999999999", "1e999999999"),
            ("negative", "-1"),
            ("of a thousand digits", "1" * 1_000),
            ("an object", "{}"),
        )
    ),
    Forged("iat in milliseconds", MALFORMED, lambda c: c.get(iat=f"{c.now_s}000", exp=f"{c.now_s + 30}000")),
    Forged("iat 31 s ago", EXPIRED, issued(-31)),
    Forged("iat an hour ago with a far exp", EXPIRED, lambda c: c.get(iat=str(c.now_s - 3600), exp="9999999999")),
    Forged("iat 0", EXPIRED, claim("iat", "0")),
    Forged("iat 6 s ahead", EARLY, issued(6), exact_clock=True),
    Forged("iat 60 s ahead", EARLY, issued(60)),
    Forged("exp is iat", MALFORMED, seconds("exp", 0)),
    Forged("exp before iat", MALFORMED, seconds("exp", -1)),
    Forged("exp now", EXPIRED, lambda c: c.get(iat=str(c.now_s - 10), exp=str(c.now_s))),
    Forged("exp past", EXPIRED, lambda c: c.get(iat=str(c.now_s - 10), exp=str(c.now_s - 5))),
]

_NONCE = [
    Forged(f"nonce {name}", NONCE, claim("nonce", text))
    for name, text in (
        ("missing", None),
        ("null", "null"),
        ("-1", "-1"),
        ("100000", "100000"),
        ("text", '"5"'),
        ("5.0", "5.0"),
        ("5e0", "5e0"),
        ("true", "true"),
        ("a list", "[5]"),
        ("of a hundred digits", "9" * 100),
    )
]

_URL = [
    Forged("url missing", URL, claim("url", None)),
    Forged("url null", URL, claim("url", "null")),
    Forged("url a list", URL, lambda c: c.get(url=f"[{quoted(c.path)}]")),
    *(
        Forged(f"url {name}", URL, url(words))
        for name, words in (
            ("empty", lambda c: ""),
            ("/", lambda c: "/"),
            ("of another path", lambda c: "/v1/other"),
            ("of the parent path", lambda c: c.path.rpartition("/")[0]),
            ("with a trailing slash", lambda c: c.path + "/"),
            ("with two slashes", lambda c: "/" + c.path),
            ("with two slashes inside", lambda c: c.path.replace("/account", "//account")),
            ("without its slash", lambda c: c.path[1:]),
            ("in upper case", lambda c: c.path.upper()),
            ("with dots to fold", lambda c: c.path + "/../webhooks"),
            ("with encoded dots", lambda c: c.path + "/%2e%2e/webhooks"),
            ("with an encoded slash", lambda c: c.path.replace("/account", "%2Faccount")),
            ("with an encoded letter", lambda c: c.path.replace("account", "%61ccount")),
            ("with a path parameter", lambda c: c.path + ";x"),
            ("with a fragment", lambda c: c.target + "#x"),
            ("with a space before", lambda c: " " + c.path),
            ("with a newline after", lambda c: c.path + "\n"),
            ("with NUL after", lambda c: c.path + "\0"),
            ("with another query", lambda c: c.path + "?limit=3"),
            ("with an empty query", lambda c: c.path + "?"),
            ("with more query", lambda c: c.target + "&x=1"),
            ("of the query alone", lambda c: c.target.removeprefix(c.path)),
            ("of a foreign origin", lambda c: "https://api.example.com" + c.path),
            ("of an origin that only begins alike", lambda c: ORIGIN + ".example.com" + c.path),
            ("of the http origin", lambda c: ORIGIN.replace("https", "http") + c.path),
            ("of another scheme", lambda c: ORIGIN.replace("https", "wss") + c.path),
            ("of an origin with a user", lambda c: ORIGIN.replace("//", "//user@") + c.path),
            ("of an origin with user and password", lambda c: ORIGIN.replace("//", "//user:pw@") + c.path),
            ("of an origin as a user", lambda c: ORIGIN + "@example.com" + c.path),
            ("of another port", lambda c: ORIGIN + ":8443" + c.path),
            ("of an empty port", lambda c: ORIGIN + ":" + c.path),
            ("of a port with a zero", lambda c: ORIGIN + ":0443" + c.path),
            ("of a host with a final dot", lambda c: ORIGIN + "." + c.path),
            ("of a host with a look-alike", lambda c: ORIGIN.replace("https", "http\u017f") + c.path),
            ("without scheme", lambda c: ORIGIN.removeprefix("https:") + c.path),
            ("of the origin alone", lambda c: ORIGIN),
            ("of the origin and another path", lambda c: ORIGIN + c.path + "/"),
            ("of the origin and two slashes", lambda c: ORIGIN + "/" + c.path),
            ("of the origin and another query", lambda c: ORIGIN + c.path + "?limit=3"),
        )
    ),
    *(
        Forged(f"target {name}", URL, target(words))
        for name, words in (
            ("of another path", lambda c: c.path + "/w-1"),
            ("with a trailing slash", lambda c: c.path + "/"),
            ("with two slashes", lambda c: "/" + c.path),
            ("with an encoded slash", lambda c: c.path.replace("/account", "%2Faccount")),
            ("with encoded dots", lambda c: "/v1/%2e%2e" + c.path),
            ("with a path parameter", lambda c: c.path + ";x"),
            ("in absolute form", lambda c: "http://api.example.org" + c.path),
            ("in absolute form with another host", lambda c: "http://evil.example.com" + c.path),
            ("in absolute form of the origin", lambda c: ORIGIN + c.path),
        )
    ),
    *(
        Forged(name, URL, target(words, signed))
        for name, words, signed in (
            ("hex in another case", lambda c: c.path + "?cursor=%2F", lambda c: c.path + "?cursor=%2f"),
            (
                "a foreign target in absolute form, signed as it is",
                lambda c: "http://evil.example.com" + c.path,
                lambda c: "http://evil.example.com" + c.path,
            ),
            ("a fragment in the target, signed as it is", lambda c: c.path + "#x", lambda c: c.path + "#x"),
        )
    ),
]

_BODY = [
    *(
        Forged(f"body claim {name}", BODY_CODE, body_claim(text))
        for name, text in (
            ("missing", None),
            ("null", "null"),
            ("empty", '""'),
            ("for nothing", '"IiI="'),
            ("not text", "5"),
            ("an object", "{}"),
            ("not base64", '"%%%%"'),
            ("of bytes that are not UTF-8", '"/////w=="'),
        )
    ),
    *(
        Forged(f"body claim {name}", BODY_CODE, body_words(words))
        for name, words in (
            ("the body itself", lambda body: body.decode()),
            ("with line breaks", lambda body: base64.encodebytes(body).decode()),
            ("in hex", lambda body: body.hex()),
            ("encoded twice", lambda body: base64.b64encode(base64.b64encode(body)).decode()),
            ("of half the body", lambda body: base64.b64encode(body[: len(body) // 2]).decode()),
            ("with too much padding", lambda body: base64.b64encode(body).decode().rstrip("=") + "==="),
            ("cut off", lambda body: base64.b64encode(body + b" " * (-len(body) % 3)).decode()[:-3]),
        )
    ),
    *(
        Forged(f"body {name}", BODY_CODE, bodies(signed, sent))
        for name, signed, sent in (
            ("of another text", b'{"url":"https://a.example.org"}', b'{"url":"https://b.example.org"}'),
            ("with one member more", b'{"active":true}', b'{"active":true,"url":null}'),
            ("with one member less", b'{"active":true,"url":null}', b'{"active":true}'),
            ("1 against true", b'{"active":1}', b'{"active":true}'),
            ("false against 0", b'{"active":false}', b'{"active":0}'),
            ("false against null", b'{"active":false}', b'{"active":null}'),
            ("2^53 against 2^53 + 1", b'{"x":9007199254740992}', b'{"x":9007199254740993}'),
            ("one bit of a double apart", b'{"x":0.1}', b'{"x":0.1000000000000000055}'),
            ("a number against its text", b'{"x":1}', b'{"x":"1"}'),
            ("a list in another order", b'{"x":[1,2]}', b'{"x":[2,1]}'),
            ("an empty list against an empty object", b'{"x":[]}', b'{"x":{}}'),
            ("a name in another case", b'{"active":true}', b'{"Active":true}'),
            ("another normal form", '{"x":"\u00e9"}'.encode(), '{"x":"e\u0301"}'.encode()),
            ("a name twice in what is sent", b'{"x":1}', b'{"x":1,"x":1}'),
            ("a name twice in what is signed", b'{"x":1,"x":1}', b'{"x":1}'),
            ("an escaped name twice", b'{"x":1}', b'{"x":1,"\\u0078":1}'),
            ("NaN in other white space", b'{"x":NaN}', b'{"x": NaN}'),
            ("a byte order mark", b'{"x":1}', b'\xef\xbb\xbf{"x":1}'),
            ("a comma too much", b'{"x":1}', b'{"x":1,}'),
            ("not UTF-8", '{"x":"\u00e9"}'.encode(), '{"x":"\u00e9"}'.encode("latin-1")),
            ("in UTF-16", b'{"x":1}', '{"x":1}'.encode("utf-16")),
            ("too deep", b"[" * 40 + b"]" * 40, b"[ " + b"[" * 39 + b"]" * 40),
            ("with a vast exponent", b'{"x":1e999999999}', b'{"x": 1e999999999}'),
            ("with half a surrogate pair", b'{"x":"\\ud800"}', b'{"x": "\\ud800"}'),
            ("text that is no JSON", b"url=a", b"url=b"),
            ("form data", b'{"url":"a"}', b"url=a"),
        )
    ),
    *(
        Forged(name, BODY_CODE, lone_body(sent, text))
        for name, sent, text in (
            ("mixed alphabets", b"\xfb\xef\xbe\xff\xff\xff", '"++++____"'),
            ("unused bits in the body claim", b'""', '"IiJ="'),
            ("one padding character too many", b'""', '"IiI=="'),
            ("padding where none belongs", b"[1]", '"WzFd="'),
            ("half the padding", b"[1 ]", '"WzEgXQ="'),
        )
    ),
    *(
        Forged(f"no body, but the claim is {name}", BODY_CODE, claim("body", text))
        for name, text in (
            ("null", "null"),
            ("a space", '" "'),
            ("false", "false"),
            ("base64 of {}", encoded(b"{}")),
            ("base64 of null", encoded(b"null")),
            ("base64 of two spaces", encoded(b"  ")),
            ("the two characters themselves", quoted('""')),
            ("the body of another request", encoded(BODY)),
            ("padding alone", '"=="'),
        )
    ),
]

FORGED: tuple[Forged, ...] = (*_ALGORITHM, *_KEY_CHOICE, *_ENCODING, *_TIME, *_NONCE, *_URL, *_BODY)


def posting(change: Callable[[Client], bytes]) -> Make:
    """The client's body is signed, `change` of it is sent: other bytes, the same JSON value."""
    return lambda client: client.post_signing(client.body, change(client))


def compact_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


GOLDEN: tuple[Golden, ...] = (
    Golden("as documented", lambda c: c.get()),
    *(Golden(f"nonce {nonce}", claim("nonce", nonce)) for nonce in ("0", "1", "99999")),
    Golden("a wide nonce", claim("nonce", "99999999"), nonce_max=99_999_999),
    Golden("exp of iat + 60", seconds("exp", 60)),
    Golden("exp in milliseconds", lambda c: c.get(exp=f"{c.now_s + 30}000")),
    Golden("exp a second from now", seconds("exp", 1), exact_clock=True),
    *(
        Golden(
            f"iat {offset_s:+} s",
            issued(offset_s),
            exact_clock=offset_s not in (-10, 0, 1),
        )
        for offset_s in (-30, -29, -10, 0, 1, 4, 5)
    ),
    Golden("unknown claims", lambda c: c.get(sub='"key-1"', method='"DELETE"', jti="1e2")),
    *(
        Golden(f"header {text.decode()}", header(text))
        for text in (
            b'{"alg":"RS256"}',
            b'{"typ":"JWT","alg":"RS256"}',
            b'{ "alg": "RS256",\n  "typ": "JWT" }',
            b'{"alg":"RS256","kid":"../../x","jku":"https://keys.example.com","x5u":"","x5c":[],"jwk":{}}',
        )
    ),
    Golden("url with the query", url(lambda c: c.target)),
    Golden("url with escaped slashes", lambda c: c.get(url=quoted(c.path).replace("/", "\\/"))),
    *(
        Golden(f"url of {name}", url(words))
        for name, words in (
            ("the origin", lambda c: ORIGIN + c.path),
            ("the origin with its port", lambda c: ORIGIN + ":443" + c.path),
            ("the origin in upper case", lambda c: ORIGIN.upper() + c.path),
            ("origin, path and query", lambda c: ORIGIN + c.target),
        )
    ),
    *(
        Golden(f"no body, claim {name}", claim("body", text))
        for name, text in (("empty", '""'), ("IiI=", '"IiI="'), ("IiI", '"IiI"'))
    ),
    Golden("the body as signed", posting(lambda c: c.body)),
    Golden("pretty print", posting(lambda c: json.dumps(c.value(), indent=2, ensure_ascii=False).encode())),
    Golden("CRLF", posting(lambda c: json.dumps(c.value(), indent=2).replace("\n", "\r\n").encode())),
    Golden("default separators of Python", posting(lambda c: json.dumps(c.value()).encode())),
    Golden("escapes instead of UTF-8", posting(lambda c: json.dumps(c.value()).replace(": ", ":").encode())),
    Golden("an escaped letter", posting(lambda c: c.body.replace(b'"url"', b'"\\u0075rl"'))),
    Golden("escaped slashes", posting(lambda c: c.body.replace(b"/", b"\\/"))),
    Golden("another order of names", posting(lambda c: compact_json(dict(reversed(c.value().items()))))),
    Golden("a final newline", posting(lambda c: c.body + b"\n")),
    Golden("white space around", posting(lambda c: b"\r\n\t " + c.body + b" \t\r\n")),
    Golden("an empty object", bodies(b"{}", b"{ }")),
    Golden(
        "numbers in other spellings", lambda c: c.post_signing(b'{"x":[1e2,0.50,-0,10]}', b'{"x":[100,5E-1,0,1.0e+1]}')
    ),
    Golden("2^53 + 1", bodies(b'{"x":9007199254740993}', b'{"x": 9007199254740993}')),
    Golden("a surrogate pair", bodies(b'{"x":"\\ud83d\\ude00"}', '{"x":"\U0001f600"}'.encode())),
    Golden("an empty text as body", bodies(b'""', b'""')),
    Golden("unpadded base64", lambda c: c.post(c.body, body=encoded(c.body).replace("=", ""))),
    Golden("url-safe base64", lambda c: c.post(c.body, body=quoted(base64.urlsafe_b64encode(c.body).decode()))),
    Golden("url-safe unpadded base64", lambda c: c.post(c.body, body=quoted(base64url(c.body)))),
    Golden(
        "url-safe base64 where it differs", lambda c: c.post(b'"???>>>~~~"', body=quoted(base64url(b'"???>>>~~~"')))
    ),
)
