"""`vaultevents call` as a customer runs it, against a receiver that believes only what the token proves."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cache
from pathlib import Path

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as ec_key
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from command_line import CommandLine, Ended
from vaultevents.cli import main
from vaultevents.core.jsonbody import MAX_BODY_BYTES
from vaultevents.core.tokens import Presented, TokenRules, check_claims, read_token, signed_by
from vaultevents.devnet.certificates import issue

pytestmark = pytest.mark.integration

API_KEY = "vek_abcdefghijklmnopqrstuvwxyz0123456789-_ABCDE"
BIG = b" " * MAX_BODY_BYTES + b"1"


@cache
def rsa() -> RSAPrivateKey:
    return generate_private_key(65537, 2048)


def pem(key: RSAPrivateKey | EllipticCurvePrivateKey, passphrase: bytes | None = None) -> bytes:
    protection = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request whose token was good for it."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


Answering = Callable[[Arrived], web.Response]


@dataclass(slots=True)
class Receiver:
    """Verifies every request as the API does, and answers as the test says."""

    url: str = ""
    arrived: list[Arrived] = field(default_factory=list)
    answer: Answering = lambda arrived: web.json_response({"id": "acme"})

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        token = read_token(request.headers["authorization"].removeprefix("Bearer "))
        assert signed_by(token, [rsa().public_key()])
        check_claims(token, Presented(request.raw_path, body), time.time(), TokenRules())
        arrived = Arrived(request.method, request.raw_path, request.headers, body)
        self.arrived.append(arrived)
        return self.answer(arrived)

    async def serve(self, tls: ssl.SSLContext | None = None) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.take)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}"
        return runner


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    runner = await found.serve()
    yield found
    await runner.cleanup()


@dataclass(frozen=True, slots=True)
class Customer:
    """A directory with `private.pem`, and the two variables that the examples use."""

    shell: CommandLine

    async def call(self, *arguments: str, stdin: bytes | None = None, **environment: str) -> Ended:
        everything = ("call", *arguments, "--private-key", "private.pem")
        if stdin is None:
            return await self.shell.run(*everything, **environment)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self.shell.program,
            *everything,
            cwd=self.shell.home,
            env=self.shell.environment | environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await process.communicate(stdin)
        assert process.returncode is not None
        return Ended(process.returncode, stdout.decode(), stderr.decode())


@pytest.fixture
def customer(tmp_path: Path, receiver: Receiver) -> Customer:
    (tmp_path / "private.pem").write_bytes(pem(rsa()))
    variables = {"VAULTEVENTS_API_KEY": API_KEY, "VAULTEVENTS_API_URL": receiver.url}
    return Customer(CommandLine.of(tmp_path, **variables))


def problem(status: int, code: str, detail: str, **headers: str) -> Answering:
    body = {"status": status, "code": code, "detail": detail}
    return lambda arrived: web.json_response(
        body, status=status, headers=headers, content_type="application/problem+json"
    )


async def test_a_read_is_signed_and_its_answer_shown(customer: Customer, receiver: Receiver) -> None:
    link = '</v1/account/webhooks?cursor=abc>; rel="next"'
    raw = b'[{"id": "wh-1"},   {"id": "wh-2"}]'
    receiver.answer = lambda arrived: web.Response(
        body=raw, content_type="application/json", headers={"Link": link, "Deprecation": "@1", "X-Other": "1"}
    )
    done = await customer.call("get", "/v1/account/webhooks?limit=2&state=a%20b")
    assert done.code == 0
    assert done.stdout == raw.decode() + "\n"
    assert done.words == ["200 OK", f"link: {link}", "deprecation: @1"]
    (arrived,) = receiver.arrived
    assert (arrived.method, arrived.target, arrived.body) == ("GET", "/v1/account/webhooks?limit=2&state=a%20b", b"")
    assert arrived.headers["x-api-key"] == API_KEY
    assert not {"content-type", "x-mfa-code", "idempotency-key"} & {name.lower() for name in arrived.headers}


@pytest.mark.parametrize(
    "target", ["/", "//v1//account", "/v1/./a/../b", "/%2e%2F?x=%zz&y", "/v1/account?", "/a;b='\"|"]
)
async def test_what_is_signed_is_what_is_sent(customer: Customer, receiver: Receiver, target: str) -> None:
    assert (await customer.call("GET", target)).code == 0
    assert receiver.arrived[0].target == target.removesuffix("?")


async def test_a_change_carries_body_code_and_idempotency_key(customer: Customer, receiver: Receiver) -> None:
    body = '{"url":"https://example.org/hook", "eventTypes": null}'
    receiver.answer = lambda arrived: web.json_response(
        {"id": "wh-1"}, status=201, headers={"Location": "/v1/account/webhooks/wh-1"}
    )
    options = ("--data", body, "--mfa", "012345", "--idempotency-key", "order-7")
    done = await customer.call("POST", "/v1/account/webhooks", *options)
    assert done.code == 0
    assert done.words == ["201 Created", "location: /v1/account/webhooks/wh-1"]
    (arrived,) = receiver.arrived
    assert arrived.body == body.encode()
    headers = [arrived.headers[name] for name in ("content-type", "x-mfa-code", "idempotency-key")]
    assert headers == ["application/json", "012345", "order-7"]


async def test_a_body_from_a_file_and_from_stdin(customer: Customer, receiver: Receiver) -> None:
    sent = '{ "url": "https://example.org/höök" }\n'.encode()
    (customer.shell.home / "body.json").write_bytes(sent)
    assert (await customer.call("PATCH", "/v1/x", "--data", "@body.json")).code == 0
    assert (await customer.call("PATCH", "/v1/x", "--data", "@-", stdin=sent)).code == 0
    assert [arrived.body for arrived in receiver.arrived] == [sent, sent]


async def test_every_call_has_a_token_of_its_own(customer: Customer, receiver: Receiver) -> None:
    for _ in range(3):
        assert (await customer.call("GET", "/v1/account")).code == 0
    assert len({arrived.headers["authorization"] for arrived in receiver.arrived}) == 3


async def test_json_is_one_object_with_everything(customer: Customer, receiver: Receiver) -> None:
    receiver.answer = lambda arrived: web.json_response({"ratio": 1}, headers={"Retry-After": "3", "X-Other": "1"})
    done = (await customer.call("GET", "/v1/account", "--json")).ok()
    assert (done.json["status"], done.json["body"]) == (200, {"ratio": 1})
    assert (done.json["headers"]["retry-after"], done.json["headers"]["x-other"]) == ("3", "1")

    receiver.answer = lambda arrived: web.Response(status=204)
    assert (await customer.call("DELETE", "/v1/x", "--json")).ok().json["body"] is None

    receiver.answer = lambda arrived: web.Response(status=502, text="<html>bad gateway")
    done = await customer.call("GET", "/v1/account", "--json")
    assert (done.json["status"], done.json["body"]) == (502, "<html>bad gateway")
    assert done.error == "the answer is 502 Bad Gateway, and no problem document of the API: see that --url leads to it"


async def test_a_problem_is_one_sentence_and_exit_code_1(customer: Customer, receiver: Receiver) -> None:
    receiver.answer = problem(429, "mfa_locked", "step-up is locked \x1b[2J for 900 s more", **{"Retry-After": "900"})
    done = await customer.call("DELETE", "/v1/x", "--mfa", "123456")
    assert done.code == 1
    assert json.loads(done.stdout)["code"] == "mfa_locked"
    assert done.words == [
        "429 Too Many Requests",
        "retry-after: 900",
        "error: mfa_locked: step-up is locked ?[2J for 900 s more",
    ]


@pytest.mark.parametrize(
    ("code", "server_ahead_s", "hint"),
    [
        ("token_expired", 3600, "is {} s behind the Date header"),
        ("token_not_yet_valid", -90, "is {} s ahead of the Date header"),
        ("token_expired", 0, "agrees with the Date header"),
    ],
)
async def test_a_wrong_clock_is_measured(
    customer: Customer, receiver: Receiver, code: str, server_ahead_s: int, hint: str
) -> None:
    def answer(arrived: Arrived) -> web.Response:
        date = formatdate(time.time() + server_ahead_s, usegmt=True)
        return problem(401, code, "set your clock", Date=date)(arrived)

    receiver.answer = answer
    sentence = (await customer.call("GET", "/v1/account", "--json")).error
    reported = [
        f"{code}: set your clock (this machine's clock {hint.format(abs(server_ahead_s) + off)} of the answer)"
        for off in (-2, -1, 0, 1, 2)
    ]
    assert sentence in reported


async def test_no_other_problem_speaks_of_the_clock(customer: Customer, receiver: Receiver) -> None:
    receiver.answer = problem(401, "token_replayed", "sign anew", Date=formatdate(0, usegmt=True))
    assert (await customer.call("GET", "/v1/account", "--json")).error == "token_replayed: sign anew"
    receiver.answer = problem(401, "token_expired", "sign anew", Date="yesterday")
    assert (await customer.call("GET", "/v1/account", "--json")).error == "token_expired: sign anew"


async def test_a_redirect_is_not_followed(customer: Customer, receiver: Receiver) -> None:
    receiver.answer = lambda arrived: web.Response(status=308, headers={"Location": f"{receiver.url}/elsewhere"})
    done = await customer.call("GET", "/v1/account", "--json")
    assert done.error == (
        f"the answer is a redirect (308 Permanent Redirect), which is not followed, to {receiver.url}/elsewhere: "
        "name the API itself in --url"
    )
    assert len(receiver.arrived) == 1


async def test_proxies_of_the_environment_are_not_used(customer: Customer, receiver: Receiver) -> None:
    dead = "http://127.0.0.1:1"
    shell = CommandLine.of(customer.shell.home, **customer.shell.environment, http_proxy=dead, ALL_PROXY=dead)
    assert (await Customer(shell).call("GET", "/v1/account")).code == 0


async def test_options_win_over_the_environment(customer: Customer, receiver: Receiver) -> None:
    options = ("--key", "vek_other", "--url", f"{receiver.url}/")
    done = await customer.call("GET", "/v1/account", *options, VAULTEVENTS_API_URL="http://127.0.0.1:1")
    assert done.code == 0
    assert receiver.arrived[0].headers["x-api-key"] == "vek_other"


async def test_a_terminal_gets_indented_json(customer: Customer, receiver: Receiver) -> None:
    receiver.answer = lambda arrived: web.Response(body=b'{"name":"\xc2\x9b31mACME"}', content_type="application/json")
    master, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "vaultevents", "call", "GET", "/v1/account", "--private-key", "private.pem"),
        cwd=customer.shell.home,
        env=customer.shell.environment,
        stdout=terminal,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(terminal)
    assert await process.wait() == 0
    shown = os.read(master, 65536).decode().replace("\r\n", "\n")
    os.close(master)
    assert shown == '{\n  "name": "\\u009b31mACME"\n}\n'  # nothing that a terminal would obey


async def test_tls_is_verified(tmp_path: Path, customer: Customer) -> None:
    customer = Customer(customer.shell.freshly())  # SSL_CERT_FILE is read when aiohttp is imported
    ca_path, tls = issue(tmp_path)
    secure = Receiver()
    runner = await secure.serve(tls)
    try:
        untrusting = await customer.call("GET", "/v1/account", "--url", secure.url)
        assert "does not speak TLS with a certificate that this machine trusts" in untrusting.error
        assert secure.arrived == []
        trusting = await customer.call("GET", "/v1/account", "--url", secure.url, SSL_CERT_FILE=str(ca_path))
        assert trusting.code == 0
        plain = await customer.call("GET", "/v1/account", "--url", secure.url.replace("https", "http"))
        assert plain.code == 1
    finally:
        await runner.cleanup()


async def test_a_server_that_is_not_there_or_breaks_off(customer: Customer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = f"http://127.0.0.1:{taken.getsockname()[1]}"
    done = await customer.call("GET", "/v1/account", "--url", closed)
    assert done.error == f"cannot reach {closed} (Connection refused): see that the API runs there"

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def other_protocol(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
        await reader.read()
        writer.close()

    for manner in (hang_up, other_protocol):
        async with await asyncio.start_server(manner, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            assert f"{url} sent no whole answer" in (await customer.call("GET", "/v1/account", "--url", url)).error

    nowhere = await customer.call("GET", "/v1/account", "--url", "http://nothing.invalid")
    assert "cannot reach http://nothing.invalid (" in nowhere.error


BAD = [
    ("a path without a slash", ["GET", "v1/account"], "the path 'v1/account' does not begin with '/'"),
    ("a whole URL as path", ["GET", "http://127.0.0.1/v1"], "does not begin with '/'"),
    ("white space in the path", ["GET", "/v1/a b"], "holds characters that no path can: percent-encode them"),
    ("a fragment", ["GET", "/v1/a#b"], "percent-encode"),
    ("a newline in the path", ["GET", "/v1/a\n"], "percent-encode"),
    ("no ASCII in the path", ["GET", "/v1/ä"], "percent-encode"),
    ("another scheme", ["GET", "/v1", "--url", "ftp://host"], "--url (or VAULTEVENTS_API_URL): 'ftp://host' is not an"),
    ("a URL with a path", ["GET", "/v1", "--url", "https://host/v1"], "without path and user name"),
    (
        "a host that is no name",
        ["GET", "/v1", "--url", "http://a..b"],
        "http://a..b holds no host name that can be looked",
    ),
    ("an endless label", ["GET", "/v1", "--url", f"http://{'a' * 64}.org"], "holds no host name that can be looked up"),
    ("a host that is no address", ["GET", "/v1", "--url", "http://[1::2::3]"], "http://[1::2::3]"),
    ("no JSON", ["POST", "/v1", "--data", "{'url': 1}"], "--data: the JSON has an error in line 1, column 2"),
    ("an empty body", ["POST", "/v1", "--data", ""], "--data: the JSON has an error"),
    ("a name twice", ["POST", "/v1", "--data", '{"a":1,"a":2}'], "--data: "),
    ("bytes that are not UTF-8", ["POST", "/v1", "--data", os.fsdecode(b'"\xff"')], "is not UTF-8: write it"),
    (
        "no body file",
        ["POST", "/v1", "--data", "@absent.json"],
        "cannot read 'absent.json' (No such file or directory)",
    ),
    ("an endless body", ["POST", "/v1", "--data", "@/dev/zero"], "the API takes at most 16384 bytes"),
    ("a body that is too large", ["POST", "/v1", "--data", "@big.json"], "the API takes at most 16384 bytes"),
    ("a code of five digits", ["POST", "/v1", "--mfa", "12345"], "--mfa takes the six digits"),
    ("a code in other digits", ["POST", "/v1", "--mfa", "١٢٣٤٥٦"], "--mfa takes the six digits"),
    (
        "a key with a newline",
        ["GET", "/v1", "--key", "vek_a\nx: y"],
        "the header x-api-key is empty or holds white space",
    ),
    ("no idempotency key", ["POST", "/v1", "--idempotency-key", ""], "the header idempotency-key is empty"),
    (
        "no key file",
        ["GET", "/v1", "--private-key", "absent.pem"],
        "cannot read absent.pem (No such file or directory)",
    ),
    ("a directory", ["GET", "/v1", "--private-key", "."], "cannot read . (Is a directory)"),
    ("an encrypted key", ["GET", "/v1", "--private-key", "locked.pem"], "locked.pem: the private key is encrypted"),
    ("another kind of key", ["GET", "/v1", "--private-key", "ec.pem"], "ec.pem: the private key is not RSA"),
    ("no key at all", ["GET", "/v1", "--private-key", "big.json"], "big.json: this is not a private key in PEM"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with good and bad files, in which the command is called without a process of its own."""
    for name, content in {
        "private.pem": pem(rsa()),
        "big.json": BIG,
        "locked.pem": pem(rsa(), b"passphrase"),
        "ec.pem": pem(ec_key(SECP256R1())),
    }.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outcome(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ended:
    monkeypatch.setattr(sys, "argv", ["vaultevents", "call", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return Ended(ended.value.code if isinstance(ended.value.code, int) else -1, *capsys.readouterr())


@pytest.mark.parametrize(("arguments", "sentence"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_one_sentence(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.setenv("VAULTEVENTS_API_KEY", API_KEY)
    default = [] if "--private-key" in arguments else ["--private-key", "private.pem"]
    done = outcome([*arguments, *default], monkeypatch, capsys)
    assert sentence in done.error
    assert "PRIVATE KEY" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["PUT", "/v1", "--private-key", "private.pem", "--key", "k"], "'PUT' is not one of GET, POST, PATCH, DELETE"),
        (["GET", "/v1", "--private-key", "private.pem"], "--key"),
        (["GET", "/v1", "--key", "k"], "--private-key"),
        (["GET"], "PATH"),
    ],
)
def test_wrong_usage(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    missing: str,
) -> None:
    done = outcome(arguments, monkeypatch, capsys)
    assert done.code == 2
    assert missing in done.stderr
