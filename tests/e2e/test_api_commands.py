"""Keys, second factors and calls as operators and customers use them, and docs/api.md run as it is written."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shlex
import shutil
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pyotp
import pytest
import segno
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from command_line import PROGRAM, Ended, Place, asking, place
from vaultevents.api.problems import CODES
from vaultevents.core.rsakeys import fingerprint, parse_public_key
from vaultevents.devnet.simulation import Simulation
from vaultevents.store import apikeys
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.e2e

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"
DOCUMENT = (DOCUMENTS / "api.md").read_text(encoding="utf-8")
STEP_S = 30
CODES_NEEDED = 4  # by each program of the document: to create, patch, rotate and delete


@pytest.fixture
async def here(tmp_path: Path, data_dir: Path, server: ServerAddress) -> AsyncIterator[Place]:
    """An operator and a customer at one desk: `acme` is registered, its key pair lies in the working directory."""
    async with place(tmp_path, data_dir, Simulation(5)) as found:
        (await found.run("account", "add", "acme")).ok()
        write_pair(tmp_path)
        yield found


@cache
def rsa(number: int) -> RSAPrivateKey:
    return generate_private_key(65537, 2048)


def public_pem(key: RSAPrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def fingerprint_of(key: RSAPrivateKey) -> str:
    return fingerprint(parse_public_key(public_pem(key)))


def write_pair(directory: Path, number: int = 0, prefix: str = "") -> None:
    private = rsa(number).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (directory / f"{prefix}private.pem").write_bytes(private)
    (directory / f"{prefix}public.pem").write_bytes(public_pem(rsa(number)))


@asynccontextmanager
async def serving(here: Place) -> AsyncIterator[str]:
    """The API alone, as the daemon serves it; yields its URL."""
    daemon = await here.shell.start("run", "--only", "api")
    await daemon.said("api_listens")
    lines = [json.loads(line) for line in daemon.stderr_so_far.splitlines() if line.startswith("{")]
    (url,) = [line["url"] for line in lines if line["event"] == "api_listens"]
    yield url
    (await daemon.end()).ok()


def blocks(language: str) -> list[str]:
    """The fenced blocks of the document in this language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


async def registered(here: Place) -> tuple[str, str]:
    """Do what the document asks of the operator; return the API key and the seed of the second factor."""
    answers: dict[str, Any] = {}
    for line in blocks("sh")[0].splitlines():
        program, *arguments = shlex.split(line)
        assert program == "vaultevents"
        answers |= (await here.run(*arguments, "--json")).ok().json
    return answers["apiKey"], parse_qs(urlsplit(answers["otpauthUri"]).query)["secret"][0]


async def run_example(
    server: ServerAddress, here: Place, program: Sequence[str], url: str, registration: tuple[str, str]
) -> str:
    """Run a customer's program with an API key and the codes of a seed on its stdin; return what it printed."""
    api_key, seed = registration
    (here.home / "bin").mkdir()
    command = here.home / "bin" / "vaultevents"
    command.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *PROGRAM])} "$@"\n')
    command.chmod(0o755)
    process = await asyncio.create_subprocess_exec(
        *program,
        cwd=here.home,
        env=here.shell.environment
        | {
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "VAULTEVENTS_API_URL": url,
            "VAULTEVENTS_API_KEY": api_key,
        },
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    typing = asyncio.create_task(type_codes(server, here, process, seed))
    stdout, stderr = await asyncio.gather(*(stream.read() for stream in (process.stdout, process.stderr) if stream))
    assert (await process.wait(), await typing) == (0, CODES_NEEDED), (stdout.decode(), stderr.decode())
    return stdout.decode()


async def type_codes(server: ServerAddress, here: Place, process: asyncio.subprocess.Process, seed: str) -> int:
    """Type the code of now whenever the one before has been used; return how many were used.

    A code is good for one change. A customer waits for the next one; here the API forgets that this one was used.
    """
    used = 0
    async with asking(server, here.schema) as connection:
        while used < CODES_NEEDED:
            await type_line(process, f"{pyotp.HOTP(seed).at(int(time.time()) // STEP_S)}\n")
            while not await connection.fetchval("select last_step from mfa_factors"):
                if process.returncode is not None:
                    return used
                await asyncio.sleep(0.02)
            used += 1
            await connection.execute("update mfa_factors set last_step = 0")
    return used


async def type_line(process: asyncio.subprocess.Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode())
    with suppress(BrokenPipeError, ConnectionResetError):  # the caller says how a program ended too early
        await process.stdin.drain()


async def came_and_went(server: ServerAddress, here: Place) -> None:
    """The one webhook of the document was created, widened to all event types, and deleted."""
    async with asking(server, here.schema) as connection:
        (row,) = await connection.fetch("select * from webhooks")
        revisions = await connection.fetch("select * from webhook_revisions order by revision")
    assert (row["account_id"], row["url"], row["event_types"]) == ("acme", "https://example.org/hook", None)
    assert row["deleted_at"] is not None
    assert [revision["event_types"] for revision in revisions][:2] == [["funding_received"], None]


async def test_the_document_with_our_own_command(here: Place, server: ServerAddress) -> None:
    async with serving(here) as url:
        script = blocks("sh")[1]
        said = await run_example(server, here, ["sh", "-euc", script], url, await registered(here))
    account, listed, patched, tested, recovered = [json.loads(line) for line in said.splitlines()]
    created = json.loads((here.home / "created.json").read_text())
    assert tested["id"].startswith("webhook_test_acme_")
    assert recovered == {"count": 0, "nextSince": None}
    assert json.loads((here.home / "rotated.json").read_text())["secretToken"] != created["secretToken"]
    assert (account["id"], account["apiKey"]["role"], account["mfa"]) == ("acme", "manage", {"enrolled": True})
    assert created.pop("secretToken").startswith("whsec_")
    assert listed == [created]
    assert patched == created | {"eventTypes": None}
    await came_and_went(server, here)


async def test_the_document_in_python(here: Place, server: ServerAddress) -> None:
    (program,) = blocks("python")
    assert len(program.split("\n\n\nprint(", maxsplit=1)[0].splitlines()) <= 30
    (here.home / "client.py").write_text(program)
    async with serving(here) as url:
        said = await run_example(server, here, [sys.executable, "client.py"], url, await registered(here))
    assert "'eventTypes': ['funding_received']" in said
    assert "'eventTypes': None" in said
    await came_and_went(server, here)


async def test_the_document_with_curl_and_openssl(here: Place, server: ServerAddress) -> None:
    if missing := [name for name in ("bash", "curl", "openssl") if shutil.which(name) is None]:
        pytest.skip(f"this machine has no {', '.join(missing)}")
    make_keys, client = blocks("bash")
    for name in ("private.pem", "public.pem"):
        (here.home / name).unlink()
    await run_bash(here, make_keys)
    async with serving(here) as url:
        program = ["bash", "-euo", "pipefail", "-c", client]
        said = await run_example(server, here, program, url, await registered(here))
    created = json.loads((here.home / "created.json").read_text())
    assert '"eventTypes":["funding_received"]' in said
    assert f'"id":"{created["id"]}"' in said
    await came_and_went(server, here)


async def run_bash(here: Place, script: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", script), cwd=here.home, env=here.shell.environment, stderr=-1
    )
    _, stderr = await process.communicate()
    assert process.returncode == 0, stderr


async def test_the_document_names_every_route_field_and_error(here: Place) -> None:
    async with (
        serving(here) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/v1/openapi.json") as answer,
    ):
        description = await answer.json()
    paths, objects = description["paths"], description["components"]["schemas"]
    routes = {(method.upper(), path): route for path, methods in paths.items() for method, route in methods.items()}
    rows = re.findall(r"^\| `(GET|POST|PATCH|DELETE) (/v1[^`?]*)` \|(.*)$", DOCUMENT, re.MULTILINE)
    assert sorted((method, path) for method, path, _ in rows) == sorted(routes)

    for method, path, rest in rows:
        parameters = {parameter["name"]: parameter["in"] for parameter in routes[method, path].get("parameters", [])}
        assert rest.startswith(" yes |") == ("X-MFA-Code" in parameters), path
        if (named := re.findall(r"`(\w+)`", rest.split("|")[0])) or "events" in path:
            assert set(named) == {name for name, place in parameters.items() if place == "query"}, path

    fields = {name for schema in objects.values() for name in schema.get("properties", ())}
    known = set(re.findall(r"\w+", DOCUMENT + (DOCUMENTS / "events.md").read_text(encoding="utf-8")))
    assert fields <= known

    codes = re.findall(r"^\| `(\w+)` \| (\d{3}) \|", DOCUMENT, re.MULTILINE)
    assert {code: int(status) for code, status in codes} == {code: status for code, (status, _) in CODES.items()}


async def asked(here: Place, url: str, api_key: str, *arguments: str, key_file: str = "private.pem") -> Ended:
    """`call` with this API key and key file."""
    environment = {"VAULTEVENTS_API_URL": url, "VAULTEVENTS_API_KEY": api_key}
    return await here.run(
        "call", *(arguments or ("GET", "/v1/account")), "--private-key", key_file, "--json", **environment
    )


async def test_the_life_of_a_key(here: Place) -> None:
    write_pair(here.home, 1, "new-")
    write_pair(here.home, 2, "third-")
    assert "no API keys yet" in (await here.run("key", "list")).ok().stdout

    said = (await here.run("key", "add", "--account", "acme", "--public-key", "public.pem")).ok().stdout
    first, api_key = said.splitlines()
    (key_id,) = re.findall(r"^Added key (key-[0-9a-f]{16}) \(read\) for account acme\.", first)
    assert re.fullmatch(r"vek_[A-Za-z0-9_-]{43}", api_key)
    listed = (await here.run("key", "list", "acme")).ok().stdout
    assert api_key not in listed
    assert [key_id, "acme", key_id, "read", "anywhere", "never", fingerprint_of(rsa(0))] == listed.splitlines()[
        1
    ].split()

    async with serving(here) as url:
        assert (await asked(here, url, api_key)).ok().json["body"]["apiKey"] == {
            "id": key_id,
            "name": key_id,
            "role": "read",
        }
        create = ("POST", "/v1/account/webhooks", "--data", '{"url":"https://example.org/"}')
        assert (await asked(here, url, api_key, *create)).error.startswith("role_insufficient: ")

        said = (await here.run("key", "rotate", key_id, "--public-key", "new-public.pem")).ok().stdout
        assert fingerprint_of(rsa(1)) in said
        assert "valid for 24h more at most" in said
        for key_file in ("private.pem", "new-private.pem"):
            (await asked(here, url, api_key, key_file=key_file)).ok()

        rotate = ("key", "rotate", key_id, "--public-key", "third-public.pem", "--overlap", "0", "--json")
        public = (await here.run(*rotate)).ok().json["publicKeys"]
        assert [one["fingerprint"] for one in public] == [fingerprint_of(rsa(number)) for number in range(3)]
        assert [one["validUntil"] is None for one in public] == [False, False, True]
        await asyncio.sleep(apikeys.MAX_AGE_S)  # the API has the former keys for so long
        for key_file in ("private.pem", "new-private.pem"):
            refused = await asked(here, url, api_key, key_file=key_file)
            assert refused.error.startswith("credentials_invalid: ")
        (await asked(here, url, api_key, key_file="third-private.pem")).ok()

        assert f"Revoked key {key_id} of account acme" in (await here.run("key", "revoke", key_id)).ok().stdout
        await asyncio.sleep(apikeys.MAX_AGE_S)
        gone = await asked(here, url, api_key, key_file="third-private.pem")
        assert gone.error.startswith("credentials_invalid: ")
    assert "revoked" in (await here.run("key", "list")).ok().stdout
    assert "no API key" in (await here.run("key", "revoke", key_id)).error


async def test_a_key_for_some_addresses_only(here: Place) -> None:
    add = ("key", "add", "--account", "acme", "--public-key", "public.pem", "--name", "back office", "--json")
    ours = (await here.run(*add, "--allow-ip", "127.0.0.1", "--allow-ip", "2001:db8::/32")).ok().json
    theirs = (await here.run(*add, "--allow-ip", "192.0.2.0/24")).ok().json
    assert ours["allowedNetworks"] == ["127.0.0.1/32", "2001:db8::/32"]
    assert (ours["name"], ours["role"], ours["revokedAt"]) == ("back office", "read", None)
    assert [key["id"] for key in (await here.run("key", "list", "--json")).ok().json["keys"]] == [
        ours["id"],
        theirs["id"],
    ]
    async with serving(here) as url:
        (await asked(here, url, ours["apiKey"])).ok()
        assert (await asked(here, url, theirs["apiKey"])).error.startswith("ip_not_allowed: ")
    first, second = (await here.run("key", "list", "--json")).ok().json["keys"]  # saved when the API had ended
    assert datetime.fromisoformat(first["lastUsedAt"]) >= datetime.fromisoformat(first["createdAt"])
    assert second["lastUsedAt"] is None


async def test_a_second_factor(here: Place) -> None:
    plain = (await here.run("mfa", "enroll", "acme")).ok().stdout
    first, uri = plain.splitlines()
    assert "shown only now" in first
    assert uri.startswith("otpauth://totp/vaultevents:acme?secret=")
    assert "already" in (await here.run("mfa", "enroll", "acme")).error

    assert "no second factor any longer" in (await here.run("mfa", "reset", "acme")).ok().stdout
    assert "no second factor: make one with 'vaultevents mfa enroll'" in (await here.run("mfa", "reset", "acme")).error
    again = (await here.run("mfa", "enroll", "acme", "--json")).ok().json
    assert again["accountId"] == "acme"
    assert again["otpauthUri"] != uri
    assert (await here.run("mfa", "reset", "acme", "--json")).ok().json == {"accountId": "acme", "reset": True}


async def test_a_terminal_shows_a_qr_code_of_the_factor(here: Place) -> None:
    shown = (await on_terminal(here, "mfa", "enroll", "acme", PYTHONIOENCODING="utf-8")).splitlines()
    drawn = StringIO()
    segno.make_qr(shown[1]).terminal(drawn, compact=True)
    assert shown[2:] == drawn.getvalue().splitlines()

    (await here.run("mfa", "reset", "acme")).ok()
    shown = (await on_terminal(here, "mfa", "enroll", "acme", PYTHONIOENCODING="latin-1")).splitlines()
    assert len(shown) == 2  # such a terminal has no blocks to draw with


async def on_terminal(here: Place, *arguments: str, **environment: str) -> str:
    """What a command writes to a terminal."""
    master, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *PROGRAM, *arguments),
        cwd=here.home,
        env=here.shell.environment | environment,
        stdout=terminal,
    )
    os.close(terminal)
    shown = await asyncio.to_thread(read_to_the_end, master)
    assert await process.wait() == 0
    os.close(master)
    return shown.decode().replace("\r\n", "\n")


def read_to_the_end(terminal: int) -> bytes:
    parts = []
    with suppress(OSError):  # raised once the writer has exited
        while part := os.read(terminal, 65536):
            parts.append(part)
    return b"".join(parts)


async def test_keys_and_factors_that_cannot_be(here: Place) -> None:
    weak = generate_private_key(65537, 1024)
    (here.home / "weak.pem").write_bytes(public_pem(weak))
    add = ("key", "add", "--account", "acme", "--public-key")
    added = (await here.run(*add, "public.pem", "--json")).ok().json
    key_id, api_key = added["id"], added["apiKey"]
    cases: list[tuple[tuple[str, ...], str]] = [
        (
            (*add, "absent.pem"),
            "cannot read absent.pem (No such file or directory): name a key in PEM with --public-key",
        ),
        ((*add, "private.pem"), "private.pem: this is a private key, which must never leave its owner"),
        ((*add, "vaultevents.toml"), "vaultevents.toml: this is not exactly one public key in PEM"),
        ((*add, "weak.pem"), "weak.pem: the RSA key has 1024 bits"),
        ((*add, "public.pem", "--allow-ip", "10.0.0.1/8"), "'10.0.0.1/8' is not a network"),
        ((*add, "public.pem", "--name", "a\x1b[2J"), "--name holds characters that cannot be printed"),
        (("key", "add", "--account", "nobody", "--public-key", "public.pem"), "there is no account 'nobody'"),
        (("key", "add", "--account", "a_b", "--public-key", "public.pem"), "'a_b' cannot be an account id"),
        (("key", "revoke", f"key-{'0' * 16}"), f"there is no API key 'key-{'0' * 16}' that is not revoked"),
        (("key", "revoke", os.fsdecode(b"\xff")), "is not UTF-8"),
        (("key", "revoke", "key-\u00fc"), "take one that 'vaultevents key list' shows"),
        (("key", "rotate", api_key, "--public-key", "public.pem"), "a key id is 'key-' and 16 hexadecimal digits"),
        (("key", "rotate", f"key-{'0' * 16}", "--public-key", "public.pem"), "that is not revoked"),
        (("key", "list", "\u00fc"), "cannot be an account id"),
        (("key", "rotate", key_id, "--public-key", "public.pem"), "has the public key SHA256:"),
        (
            ("key", "rotate", key_id, "--public-key", "public.pem", "--overlap", "soon"),
            "--overlap 'soon' is not a time: write 0, or 1s to 30d, as in 24h",
        ),
        (("key", "rotate", key_id, "--public-key", "public.pem", "--overlap", "1h, 2h"), "is not a time"),
        (("mfa", "enroll", "nobody"), "there is no account 'nobody'"),
        (("mfa", "reset", "nobody"), "there is no account 'nobody'"),
        (("mfa", "reset", "\u00fc"), "cannot be an account id"),
    ]
    for arguments, sentence in cases:
        done = await here.run(*arguments)
        assert sentence in done.error, arguments
        assert not any(secret in done.stdout + done.stderr for secret in ("PRIVATE KEY", api_key))
    usage = await here.run(*add, "public.pem", "--role", "admin")
    assert usage.code == 2
    assert "'admin' is not one of read, manage" in usage.stderr
    assert len((await here.run("key", "list", "--json")).ok().json["keys"]) == 1
