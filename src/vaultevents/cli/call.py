"""call: send one request to the HTTP API, signed as customers sign it (rules A9 to A12). Needs no configuration."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import aiohttp
import typer
from yarl import URL

from vaultevents.cli.options import JsonOption, one_of, read_key
from vaultevents.cli.terminal import complete, put_json, say
from vaultevents.core.environment import CALL_KEY_VARIABLE, CALL_URL_VARIABLE
from vaultevents.core.errors import ConfigError, InputError, OperatorError
from vaultevents.core.jsonbody import MAX_BODY_BYTES, parse_json
from vaultevents.core.rsakeys import load_private_key
from vaultevents.core.tokens import parse_origin, sign_request

DEFAULT_URL: Final = "http://127.0.0.1:8420"

METHODS: Final = ("GET", "POST", "PATCH", "DELETE")
NONCES: Final = 100_000
TIMEOUT: Final = aiohttp.ClientTimeout(total=30, sock_connect=10)
NOTABLE: Final = ("link", "location", "retry-after", "deprecation", "sunset")
"""Headers that show a person what to do next."""
SAME_CLOCK_S: Final = 2
"""A Date header counts whole seconds, and the answer took time."""


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """What came back, and when by the clock of this machine."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    at_s: float

    @property
    def value(self) -> Any:
        """The body as JSON says it, else as text; None without one."""
        if not self.body:
            return None
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return self.body.decode(errors="replace")


def call(
    method: Annotated[str, typer.Argument(help=f"One of {', '.join(METHODS)}.", metavar="METHOD")],
    path: Annotated[str, typer.Argument(help="What to ask for, such as '/v1/account'.", metavar="PATH")],
    private_key: Annotated[
        Path, typer.Option(help="Your RSA private key in PEM; it never leaves this machine.", metavar="FILE")
    ],
    key: Annotated[
        str,
        typer.Option(
            envvar=CALL_KEY_VARIABLE,
            help="Your API key; from the environment it does not show in lists of processes.",
            metavar="KEY",
        ),
    ],
    mfa: Annotated[str | None, typer.Option(help="The present code of the second factor.", metavar="CODE")] = None,
    data: Annotated[
        str | None, typer.Option(help="The body: JSON, or @FILE that holds it, or @- for stdin.", metavar="JSON")
    ] = None,
    url: Annotated[
        str, typer.Option(envvar=CALL_URL_VARIABLE, help="Where the API is served.", metavar="URL")
    ] = DEFAULT_URL,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Makes a create safe to repeat for 24 hours.", metavar="KEY")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Send one signed request to the HTTP API, as a customer would.

    The answer's body goes to stdout, its status and the headers that matter to stderr. Exit code 0 for a 2xx. Needs no
    configuration file.
    """
    method = method.upper()
    one_of(METHODS, method, "METHOD")
    target = _target(url, path)
    signing_key = read_key(private_key, "--private-key", load_private_key)
    headers = _headers({"x-api-key": key, "idempotency-key": idempotency_key, "x-mfa-code": _code(mfa)})
    body = b"" if data is None else _body(data)
    if body:
        headers["content-type"] = "application/json"
    # what is signed is the target as it is sent, however the URL was taken apart
    token = sign_request(
        signing_key,
        target=target.raw_path_qs,
        body=body,
        now_s=time.time(),
        nonce=secrets.randbelow(NONCES),
    )
    answer = complete(_send(method, target, {**headers, "authorization": f"Bearer {token}"}, body))
    if as_json:
        put_json({"status": answer.status, "headers": answer.headers, "body": answer.value})
    else:
        _show(answer)
    if not 200 <= answer.status < 300:
        raise OperatorError(_problem(answer))


_PATH = re.compile(r"/[!-\"$-~]*")  # printable ASCII without "#", behind which nothing is sent
_HEADER_VALUE = re.compile(r"[!-~]+")
_CODE = re.compile(r"[0-9]{6}")


def _target(url: str, path: str) -> URL:
    if not path.startswith("/"):
        raise InputError(f"the path {path[:80]!r} does not begin with '/': write it as in /v1/account")
    if not _PATH.fullmatch(path):
        raise InputError(f"the path {path[:80]!r} holds characters that no path can: percent-encode them")
    try:
        origin = parse_origin(url.removesuffix("/"))
    except ConfigError as error:
        raise InputError(f"--url (or {CALL_URL_VARIABLE}): {error}") from None
    return URL(origin + path, encoded=True)


def _headers(values: Mapping[str, str | None]) -> dict[str, str]:
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if not _HEADER_VALUE.fullmatch(value):
            raise InputError(
                f"what is given for the header {name} is empty or holds white space or characters beyond ASCII: "
                "copy it again"
            )
    return given


def _code(mfa: str | None) -> str | None:
    """Only six digits are sent: the API counts anything else as a guess."""
    if mfa is not None and not _CODE.fullmatch(mfa):
        raise InputError("--mfa takes the six digits that your authenticator app shows now")
    return mfa


def _body(data: str) -> bytes:
    """The bytes as they are given, after a look whether they are JSON."""
    if data == "@-":
        raw = _limited(sys.stdin.buffer)
    elif data.startswith("@"):
        try:
            with Path(data[1:]).open("rb") as file:
                raw = _limited(file)
        except OSError as error:
            raise InputError(
                f"cannot read {data[1:]!r} ({error.strerror}): name a file of JSON behind the @ of --data"
            ) from None
    else:
        raw = data.encode()
    if len(raw) > MAX_BODY_BYTES:
        raise InputError(f"the body is too large: the API takes at most {MAX_BODY_BYTES} bytes")
    try:
        parse_json(raw)
    except InputError as error:
        raise InputError(f"--data: {error}") from None
    return raw


def _limited(file: BinaryIO) -> bytes:
    return file.read(MAX_BODY_BYTES + 1)


async def _send(method: str, target: URL, headers: Mapping[str, str], body: bytes) -> ApiResponse:
    origin = target.origin()
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=aiohttp.ThreadedResolver()), timeout=TIMEOUT, trust_env=False
            ) as session,
            session.request(method, target, headers=headers, data=body or None, allow_redirects=False) as answer,
        ):
            content = await answer.read()
            names = dict.fromkeys(name.lower() for name in answer.headers)
            merged = {name: ", ".join(answer.headers.getall(name)) for name in names}
            return ApiResponse(answer.status, merged, content, time.time())
    except aiohttp.ClientSSLError:
        raise OperatorError(
            f"{origin} does not speak TLS with a certificate that this machine trusts: correct the URL, or name the "
            "certificate's authority in SSL_CERT_FILE"
        ) from None
    except aiohttp.ClientConnectorError as error:
        raise OperatorError(f"cannot reach {origin} ({_reason(error.os_error)}): see that the API runs there") from None
    except UnicodeError:  # of the resolver: a label that is empty or too long
        raise InputError(f"{origin} holds no host name that can be looked up: correct --url") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise OperatorError(
            f"{origin} sent no whole answer ({type(error).__name__}): if this was a change, look whether it took place "
            "before you repeat it"
        ) from None


def _reason(error: OSError) -> str:
    """The system's words; asyncio has its own, and those of a name that is not found come without a number of its."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)


def _show(answer: ApiResponse) -> None:
    if answer.body:
        is_json = "json" in answer.headers.get("content-type", "")
        pretty = is_json and sys.stdout.isatty() and not isinstance(answer.value, str)
        say(json.dumps(answer.value, indent=2) if pretty else answer.body.decode(errors="replace"))
    notable = [f"{name}: {answer.headers[name]}" for name in NOTABLE if name in answer.headers]
    with suppress(OSError):
        sys.stderr.write("".join(f"{_printable(line)}\n" for line in (_status(answer.status), *notable)))


def _status(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _problem(answer: ApiResponse) -> str:
    """One sentence from the problem's own, or from the status where the answer is not the API's."""
    match answer.value:
        case {"code": str(code), "detail": str(detail)}:
            hint = _clock(answer) if code in ("token_expired", "token_not_yet_valid") else ""
            return _printable(f"{code}: {detail}{hint}")
    status = _status(answer.status)
    if 300 <= answer.status < 400 and "location" in answer.headers:
        place = _printable(answer.headers["location"])
        return f"the answer is a redirect ({status}), which is not followed, to {place}: name the API itself in --url"
    return f"the answer is {status}, and no problem document of the API: see that --url leads to it"


def _clock(answer: ApiResponse) -> str:
    """How far this machine's clock and the server's are apart, by the Date header."""
    try:
        difference_s = round(answer.at_s - parsedate_to_datetime(answer.headers["date"]).timestamp())
    except (KeyError, ValueError, OverflowError):
        return ""
    if abs(difference_s) < SAME_CLOCK_S:
        return " (this machine's clock agrees with the Date header of the answer)"
    way = "ahead of" if difference_s > 0 else "behind"
    return f" (this machine's clock is {abs(difference_s)} s {way} the Date header of the answer)"


def _printable(text: str) -> str:
    """What a server said, fit for a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
