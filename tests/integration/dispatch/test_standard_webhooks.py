"""Real deliveries verify with the Standard Webhooks libraries in Python and JavaScript (rules D1, D2 and T12)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import evm
from rotation_factories import delivering, rotate, verifies
from store_factories import KEY, commit, funding, simple_simulation, webhook
from vaultevents.devnet.receivers import Received, Receivers
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

PLAIN_HEADER = "x-signature"
OVERLAP_S = 3.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a receiver with one secret makes of one delivery, by the standard headers and by the plain one."""

    standard: bool
    plain: bool


Library = Callable[[str, Sequence[Received]], list[Verdict]]


def in_python(secret: str, received: Sequence[Received]) -> list[Verdict]:
    return [
        Verdict(
            verifies(secret, one),
            one.headers[PLAIN_HEADER] == hmac.new(secret.encode(), one.body, hashlib.sha256).hexdigest(),
        )
        for one in received
    ]


def in_javascript(secret: str, received: Sequence[Received]) -> list[Verdict]:
    node = shutil.which("node")
    if node is None or not (evm.CONTRACTS / "node_modules" / "standardwebhooks").is_dir():
        evm.absent("node, or the library standardwebhooks of contracts/package-lock.json, is not installed")
    asked = [
        {
            "secret": secret,
            "headers": dict(one.headers),
            "body": base64.b64encode(one.body).decode(),
            "plainHeader": PLAIN_HEADER,
        }
        for one in received
    ]
    command = [node, "verify.js"]
    done = subprocess.run(
        command, cwd=evm.CONTRACTS, input=json.dumps(asked), capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return [Verdict(**load) for load in json.loads(done.stdout)]


@pytest.fixture(params=[in_python, in_javascript])
def library(request: pytest.FixtureRequest) -> Library:
    chosen: Library = request.param
    return chosen


@pytest.fixture
async def receivers(tmp_path: Path) -> AsyncIterator[Receivers]:
    server = Receivers(tmp_path)
    await server.start()
    yield server
    await server.stop()


async def test_every_delivery_of_a_rotation_verifies(
    database: Database, receivers: Receivers, library: Library
) -> None:
    """Before it with the old secret, then with either, at last with the new one; the plain header changes at once."""
    box, hook = await simple_simulation(database), receivers.hook("acme")
    one = await webhook(database, url=hook.url)
    async with delivering(database, receivers, KEY, plain_header=PLAIN_HEADER):
        await commit(box, funding(1))
        await hook.arrivals(1)
        newer, until = await rotate(database, one, OVERLAP_S)
        await commit(box, funding(2))
        await hook.arrivals(2)
        assert await database.now() < until, "this machine is too slow for the overlap"
        while await database.now() < until:
            await asyncio.sleep(0.05)
        await commit(box, funding(3))
        received = await hook.arrivals(3)
    good, bad = Verdict(standard=True, plain=True), Verdict(standard=False, plain=False)
    assert library(one.secret, received) == [good, Verdict(standard=True, plain=False), bad]
    assert library(newer, received) == [bad, good, good]


async def test_what_was_tampered_with_does_not_verify(
    database: Database, receivers: Receivers, library: Library
) -> None:
    """The negative control: another body, id, time, secret, and a signature of another version."""
    box, hook = await simple_simulation(database), receivers.hook("acme")
    one = await webhook(database, url=hook.url)
    async with delivering(database, receivers, KEY, plain_header=PLAIN_HEADER):
        await commit(box, funding(1))
        (real,) = await hook.arrivals(1)
    sent_s = int(real.headers["webhook-timestamp"])
    assert library(one.secret, [real]) == [Verdict(standard=True, plain=True)]
    assert library((await webhook(database)).secret, [real]) == [Verdict(standard=False, plain=False)]
    other_body = replace(real, body=real.body.replace(b"funding", b"Funding", 1))
    assert library(one.secret, [other_body]) == [Verdict(standard=False, plain=False)]
    other_headers = [
        {"webhook-id": f"{real.webhook_id}x"},
        {"webhook-timestamp": str(sent_s + 1)},
        {"webhook-timestamp": str(sent_s - 3600)},
        {"webhook-signature": real.headers["webhook-signature"].replace("v1,", "v2,")},
    ]
    altered = [replace(real, headers={**real.headers, **headers}) for headers in other_headers]
    assert library(one.secret, altered) == [Verdict(standard=False, plain=True)] * len(altered)
