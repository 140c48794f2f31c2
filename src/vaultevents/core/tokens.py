"""The token that signs a request: an RS256 JWT for one url, one body and 30 seconds (rules A7 and A9 to A13).

Own checks, because libraries that accept "a valid JWT" accept too much: without `iat`, with a text as `iat`, with names
twice, with padding appended. The order is structure, signature, claims. What is wrong with a claim is reported only
after the signature verified.

    read_token(text) -> signed_by(token, keys) -> check_claims(token, presented, now_s, rules) -> replay_digest
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey, RSAPublicNumbers
from cryptography.hazmat.primitives.hashes import SHA256

from vaultevents.core.errors import ConfigError, VaulteventsError
from vaultevents.core.jsonbody import JsonMalformed, JsonValue, parse_json, same_value
from vaultevents.core.rsakeys import MIN_KEY_BITS

MAX_TOKEN_CHARS: Final = 64 * 1024  # the whole header block has no more (rule A17)
MAX_AGE_S: Final = 30
MAX_AHEAD_S: Final = 5
LIFETIME_S: Final = 30
NOT_SECONDS: Final = 10**11
EMPTY_JSON: Final = b'""'  # what clients sign that stringify a missing body
_SHOWN_CHARS: Final = 120


class TokenRejected(VaulteventsError):
    """The token does not authenticate its request. `code` is that of the answer, the text its detail (rule A7)."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the right structure; nothing in it is verified yet. Its parts are a credential and do not print."""

    signing_input: bytes = field(repr=False)
    signature: bytes = field(repr=False)
    payload: bytes = field(repr=False)


_COMPACT = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")
# The characters whose unused bits are zero, by the length of the last group: else two texts would be one token.
_LAST: Final = {0: "", 2: "AQgw", 3: "AEIMQUYcgkosw048"}
_RS256: Final = "RS256"


def read_token(text: str) -> Token:
    """The token in an `Authorization: Bearer` header (RFC 7515, compact); raises `TokenRejected` (`token_malformed`).

    Three parts in strict base64url; a header that is a JSON object with `alg` RS256 and without `crit` and `b64`. Keys
    or their addresses in the header (`jwk`, `jku`, `kid`, `x5c`, `x5u`) are ignored.
    """
    if len(text) > MAX_TOKEN_CHARS:
        raise _malformed(f"the token has {len(text)} characters: at most {MAX_TOKEN_CHARS} are read")
    compact = _COMPACT.fullmatch(text)
    if compact is None:
        raise _malformed(
            "the token is not a signed JWT: send header, payload and signature in base64url, joined by points, without "
            "padding and white space"
        )
    header, payload, signature = compact.groups()
    if header not in _USUAL_HEADERS:
        _check_header(_part(header))
    return Token(text[: compact.start(3) - 1].encode("ascii"), _part(signature), _part(payload))


def signed_by(token: Token, keys: Sequence[RSAPublicKey]) -> bool:
    """Whether one of `keys` signed it (RSASSA-PKCS1-v1_5 with SHA-256).

    Without keys the work is done all the same, so that an unknown API key takes as long as a wrong signature.
    """
    verified = any(_verifies(key, token) for key in keys or (_DECOY,))
    return verified and bool(keys)


def replay_digest(api_key_id: str, token: Token) -> bytes:
    """The key of single use (rule A13): SHA-256 of the API key's id and the signing input, never of the token text."""
    return hashlib.sha256(api_key_id.encode() + b"\0" + token.signing_input).digest()


def _malformed(detail: str) -> TokenRejected:
    return TokenRejected("token_malformed", detail)


def _part(text: str) -> bytes:
    data = _decoded(text)
    if data is None:
        raise _malformed("a part of the token is cut off or not canonical base64url: send it as it was made")
    return data


def _decoded(text: str) -> bytes | None:
    """Unpadded base64 of either alphabet, `None` if it is cut off or has set bits that stand for nothing."""
    rest = len(text) % 4
    if rest == 1 or (rest and text[-1] not in _LAST[rest]):
        return None
    return binascii.a2b_base64(text.replace("-", "+").replace("_", "/") + "=" * (-rest % 4))


def _check_header(raw: bytes) -> None:
    try:
        header = parse_json(raw)
    except JsonMalformed as error:
        raise _malformed(f"the header of the token cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise _malformed('the header of the token is not a JSON object: send one such as {"alg":"RS256"}')
    if header.get("alg") != _RS256:
        raise _malformed(f"the token's alg is {_shown(header, 'alg')}: sign it with {_RS256}")
    for name in ("crit", "b64"):
        if name in header:
            raise _malformed(f"the header of the token holds {name!r}, which is not supported: leave it out")


_USUAL_HEADERS: Final = frozenset(
    base64.urlsafe_b64encode(header).decode("ascii").rstrip("=")
    for header in (b'{"alg":"RS256"}', b'{"alg":"RS256","typ":"JWT"}', b'{"typ":"JWT","alg":"RS256"}')
)

_PADDING: Final = PKCS1v15()
_HASH: Final = SHA256()
_DECOY: Final = RSAPublicNumbers(65537, 2**MIN_KEY_BITS - 1).public_key()


def _verifies(key: RSAPublicKey, token: Token) -> bool:
    try:
        key.verify(token.signature, token.signing_input, _PADDING, _HASH)
    except InvalidSignature:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Presented:
    """The request that came with a token: its request-target exactly as sent, and its body."""

    target: str
    body: bytes


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The operator's settings: the highest nonce, and the origins under which clients know this service."""

    nonce_max: int = 99_999
    origins: frozenset[str] = frozenset()


def check_claims(token: Token, presented: Presented, now_s: float, rules: TokenRules) -> None:
    """Raises `TokenRejected` unless the signed claims are fresh and belong to this request (rules A9 to A12).

    `now_s` is the service clock. Judged in this order: `iat`, `exp`, `nonce`, `url`, `body`; other claims are ignored.
    """
    try:
        claims = parse_json(token.payload)
    except JsonMalformed as error:
        raise _malformed(f"the payload of the token cannot be read: {error}") from None
    if not isinstance(claims, dict):
        raise _malformed("the payload of the token is not a JSON object: sign the claims iat, exp, nonce, url and body")
    _check_times(claims, now_s)
    _check_nonce(claims, rules.nonce_max)
    _check_url(claims, presented.target, rules.origins)
    _check_body(claims, presented.body)


def _check_times(claims: Mapping[str, JsonValue], now_s: float) -> None:
    iat, exp = _seconds(claims, "iat"), _seconds(claims, "exp")
    if iat > NOT_SECONDS:
        raise _malformed("claim iat looks like milliseconds: use seconds since 1970-01-01 UTC")
    if now_s - iat > MAX_AGE_S:
        raise TokenRejected(
            "token_expired",
            f"the token was issued {now_s - iat:.1f} s ago {_by_clock(now_s)}, and {MAX_AGE_S} s is the limit: "
            "sign each request anew, and set your clock if it is slow",
        )
    if iat > now_s + MAX_AHEAD_S:
        raise TokenRejected(
            "token_not_yet_valid",
            f"the token was issued {iat - now_s:.1f} s in the future {_by_clock(now_s)}, and {MAX_AHEAD_S} s is the "
            "limit: set your clock",
        )
    if exp <= iat:
        raise _malformed("claim exp is not later than iat: set it to iat + 30")
    if now_s >= exp:
        raise TokenRejected(
            "token_expired",
            f"the token was issued {now_s - iat:.1f} s ago {_by_clock(now_s)} and was to live {exp - iat} s: "
            "set exp to iat + 30, and set your clock if it is slow",
        )


def _by_clock(now_s: float) -> str:
    return f"by this service's clock ({datetime.fromtimestamp(now_s, UTC).isoformat(timespec='milliseconds')})"


def _seconds(claims: Mapping[str, JsonValue], name: str) -> int:
    value = claims.get(name)
    if type(value) is not int or value < 0:
        raise _malformed(
            f"claim {name} is {_shown(claims, name)}: use a whole number of seconds since 1970-01-01 UTC, "
            "such as 1700000000"
        )
    return value


def _check_nonce(claims: Mapping[str, JsonValue], nonce_max: int) -> None:
    nonce = claims.get("nonce")
    if type(nonce) is not int or not 0 <= nonce <= nonce_max:
        raise TokenRejected(
            "token_nonce_invalid",
            f"claim nonce is {_shown(claims, 'nonce')}: use a random whole number from 0 to {nonce_max}",
        )


def _check_url(claims: Mapping[str, JsonValue], target: str, origins: frozenset[str]) -> None:
    claim = claims.get("url")
    if isinstance(claim, str) and _is_url_of(claim, target, origins):
        return
    signed = _shown(claims, "url")
    absolute = _ABSOLUTE.fullmatch(claim) if isinstance(claim, str) else None
    if absolute and target.startswith("/") and _origin(absolute) not in origins:
        detail = f"claim url is {signed}, and this service does not know itself by that origin: sign the path alone"
    else:
        detail = f"claim url is {signed}, but the request asks for {_quoted(target)}: sign the path exactly as sent"
    raise TokenRejected("token_url_mismatch", detail)


# In ASCII only, or U+017F would pass for "s"; no userinfo, because "@" is not among the characters of a host.
_ABSOLUTE = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[1-9][0-9]{0,4}))?(?P<rest>[/?].*)?",
    re.IGNORECASE | re.ASCII | re.DOTALL,
)
_DEFAULT_PORTS: Final = {"https": "443", "http": "80"}


def _is_url_of(claim: str, target: str, origins: frozenset[str]) -> bool:
    """Whether the signed text stands for the request-target, neither of them decoded or folded (rule A10)."""
    if "#" in target:  # servers cut a fragment off, so that another path would run than the one that was signed
        return False
    absolute = None if claim.startswith("/") else _ABSOLUTE.fullmatch(claim)
    if absolute is not None and _origin(absolute) not in origins:
        return False
    if not target.startswith("/"):
        return absolute is not None and claim == target
    path = claim if absolute is None else absolute["rest"]
    return path == target or path == target.partition("?")[0]


def _origin(absolute: re.Match[str]) -> str:
    scheme, host, port = absolute["scheme"].lower(), absolute["host"].lower(), absolute["port"]
    suffix = "" if port is None or port == _DEFAULT_PORTS[scheme] else f":{port}"
    return f"{scheme}://{host}{suffix}"


def parse_origin(text: str) -> str:
    """A public origin of this service in lower case, without a default port (rule A10); raises `ConfigError`."""
    absolute = _ABSOLUTE.fullmatch(text)
    if absolute is None or absolute["rest"] is not None or int(absolute["port"] or 0) > 65535:
        raise ConfigError(
            f"{_quoted(text)} is not an origin: write it as https://api.example.org or https://api.example.org:8443, "
            "without path and user name, an international name in its ASCII form"
        )
    return _origin(absolute)


def _check_body(claims: Mapping[str, JsonValue], body: bytes) -> None:
    """Rule A11: nothing signed for nothing sent; else the same bytes, or the same JSON value."""
    if not body and "body" not in claims:
        return
    claim = claims.get("body", "")
    if not isinstance(claim, str):
        raise _body_mismatch(f"claim body is {_shown(claims, 'body')}: sign the base64 of the request body as text")
    if not body and not claim:
        return
    if not claim:
        lack = "empty" if "body" in claims else "missing"
        raise _body_mismatch(f"claim body is {lack}, but the request has a body: sign the base64 of it")
    signed = _decoded_body(claim)
    if signed is None:
        raise _body_mismatch("claim body is not base64: encode the bytes of the request body, without line breaks")
    if not body:
        if signed != EMPTY_JSON:
            raise _body_mismatch("claim body holds a body, but the request came without: leave the claim out")
    elif not hmac.compare_digest(signed, body):
        _check_same_json(signed, body)


def _check_same_json(signed: bytes, body: bytes) -> None:
    try:
        sent_value = parse_json(body)
    except JsonMalformed as error:
        raise _body_mismatch(f"the request body differs from claim body and cannot be read: {error}") from None
    try:
        signed_value = parse_json(signed)
    except JsonMalformed as error:
        raise _body_mismatch(f"claim body differs from the request body and cannot be read: {error}") from None
    if not same_value(signed_value, sent_value):
        raise _body_mismatch("claim body holds another JSON value than the request body: sign the body that is sent")


def _body_mismatch(detail: str) -> TokenRejected:
    return TokenRejected("token_body_mismatch", detail)


_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]*|[A-Za-z0-9_-]*)={0,2}")


def _decoded_body(text: str) -> bytes | None:
    """Base64 of one alphabet, padded fully or not at all, `None` if it is anything else."""
    digits = text.rstrip("=")
    if not _BASE64.fullmatch(text) or (digits != text and len(text) % 4):
        return None
    return _decoded(digits)


def _shown(members: Mapping[str, JsonValue], name: str) -> str:
    """A member as a message shows it: short and printable."""
    if name not in members:
        return "missing"
    match members[name]:
        case str(text):
            return _quoted(text)
        case dict():
            return "an object"
        case list():
            return "a list"
        case None | bool() as constant:
            return json.dumps(constant)
        case number:
            return str(number)


def _quoted(text: str) -> str:
    return ascii(text[:_SHOWN_CHARS]) + "..." * (len(text) > _SHOWN_CHARS)


def sign_request(private_key: RSAPrivateKey, *, target: str, body: bytes, now_s: float, nonce: int) -> str:
    """A token as a customer makes it: for the path and query `target`, `body` (empty if none) and the next 30 s."""
    claims: dict[str, int | str] = {"iat": int(now_s), "exp": int(now_s) + LIFETIME_S, "nonce": nonce, "url": target}
    if body:
        claims["body"] = base64.b64encode(body).decode("ascii")
    parts = ({"alg": _RS256, "typ": "JWT"}, claims)
    signing_input = b".".join(_base64url(json.dumps(part, separators=(",", ":")).encode()) for part in parts)
    signature = private_key.sign(signing_input, _PADDING, _HASH)
    return (signing_input + b"." + _base64url(signature)).decode("ascii")


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
