"""A beacon node of a made-up network on loopback: honest by itself, with any answer replaced by a test."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import web

from vaultevents.chain.beacon.client import BeaconChain, BeaconOptions
from vaultevents.core.units import Hash32
from vaultevents.core.validators import FAR_FUTURE_EPOCH, ValidatorRecord
from vaultevents.devnet.loopback import LoopbackServer

SECRET = "k3y-that-must-not-show"
QUICK = BeaconOptions(retry_wait_s=0.01)
GENESIS_S, SLOT_S, SLOTS_PER_EPOCH = 1_600_000_000, 12, 8
VAULT = bytes.fromhex("1111aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa2222")
STATES = "/eth/v1/beacon/states/"
VALIDATORS = f"{STATES}finalized/validators"
CHECKPOINTS = f"{STATES}head/finality_checkpoints"
HEADER = "/eth/v1/beacon/headers/finalized"
SYNCING = "/eth/v1/node/syncing"
GENESIS = "/eth/v1/beacon/genesis"
CONFIG = "/eth/v1/config/spec"

STATE = "/eth/v2/debug/beacon/states/finalized"
FURTHER: dict[str, Any] = {
    "SLOTS_PER_EPOCH": "8",
    "SLOTS_PER_HISTORICAL_ROOT": "64",
    "BLOB_SCHEDULE": [{"EPOCH": "412672", "MAX_BLOBS_PER_BLOCK": "15"}],
}

Json = dict[str, Any]
Meddle = Callable[[Any], Any]


class Page(Exception):
    """A whole answer in place of JSON with status 200."""

    def __init__(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        super().__init__(status)
        self.response = web.Response(status=status, body=body, headers=headers)


def refuse(status: int, message: str = "") -> Meddle:
    """An error answer with this status."""

    def meddle(_: Any) -> Any:
        raise Page(status, json.dumps({"code": status, "message": message}).encode())

    return meddle


def root(name: object) -> str:
    return "0x" + f"{name}".encode().hex().rjust(64, "0")


GENESIS_ROOT = Hash32(bytes.fromhex(root("genesis")[2:]))


def record(index: int, *, vault: bytes = VAULT, activation: int = 0, exit_epoch: int = 2**64 - 1) -> Json:
    return {
        "index": str(index),
        "balance": "32000000000",
        "status": "active_ongoing",
        "validator": {
            "pubkey": "0x" + index.to_bytes(48).hex(),
            "withdrawal_credentials": "0x01" + "00" * 11 + vault.hex(),
            "effective_balance": "32000000000",
            "slashed": False,
            "activation_eligibility_epoch": "0",
            "activation_epoch": str(activation),
            "exit_epoch": str(exit_epoch),
            "withdrawable_epoch": str(2**64 - 1),
        },
    }


class FakeBeacon:
    """Finality of `epoch`, whose block is in its first slot; validators 0 to `size` - 1, every third of the vault.

    `meddle` maps a path to what is done to its answer; `seen` has every question.
    """

    def __init__(self, size: int = 130, epoch: int = 10, meddle: dict[str, Meddle] | None = None) -> None:
        self.records = [record(at, vault=VAULT if at % 3 == 0 else b"\xee" * 20) for at in range(size)]
        self.epoch = epoch
        self.chain = "one"
        self.lag = 0
        self.meddle = meddle or {}
        self.seen: list[tuple[str, str, Any]] = []
        self.whole: Callable[[web.BaseRequest], Any] | None = None
        self._server = LoopbackServer(self._answer)

    async def start(self) -> str:
        return await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    def asked(self, path: str) -> int:
        return sum(one == path for _, one, _ in self.seen)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path.removeprefix(f"/{SECRET}")
        sent = await request.json() if request.method == "POST" else request.query.getall("id", [])
        self.seen.append((request.method, path, sent))
        if self.whole is not None and path == VALIDATORS:
            answer: web.StreamResponse = await self.whole(request)
            return answer
        try:
            found = self._found(path, sent)
            for key in (path, f"{request.method} {path}"):
                found = self.meddle.get(key, lambda same: same)(found)
        except Page as page:
            return page.response
        return web.Response(body=json.dumps(found).encode(), content_type="application/json")

    def _found(self, path: str, sent: Any) -> Json:
        head = (self.epoch + 2) * SLOTS_PER_EPOCH - self.lag
        match path:
            case "/eth/v1/node/syncing":
                return {"data": {"head_slot": str(head), "sync_distance": "0", "is_syncing": False}}
            case "/eth/v1/beacon/genesis":
                return {"data": {"genesis_time": str(GENESIS_S), "genesis_validators_root": root("genesis")}}
            case "/eth/v1/config/spec":
                return {"data": {"SECONDS_PER_SLOT": str(SLOT_S)} | FURTHER}
            case "/eth/v1/beacon/states/head/finality_checkpoints":
                epoch = str(self.epoch)
                return {
                    "data": {"finalized": {"epoch": epoch, "root": self.block_root(self.epoch)}},
                    "finalized": False,
                }
            case "/eth/v1/beacon/headers/finalized":
                return self._header(self.epoch)
            case "/eth/v1/beacon/states/finalized/validators":
                ids = sent.get("ids", []) if isinstance(sent, dict) else sent
                found = [self.records[int(at)] for at in ids if int(at) < len(self.records)] if ids else self.records
                return {"execution_optimistic": False, "finalized": True, "data": found}
        for known in range(self.epoch + 1):
            if path == f"/eth/v1/beacon/headers/{self.block_root(known)}":
                return self._header(known)
        if path in self.meddle:
            return {}  # a route that only the test knows
        raise Page(404, b'{"code": 404, "message": "not found here"}')

    def block_root(self, epoch: int) -> str:
        return root(f"{self.chain}{epoch}")

    def _header(self, epoch: int) -> Json:
        slot = str(epoch * SLOTS_PER_EPOCH)
        return {"data": {"root": self.block_root(epoch), "canonical": True, "header": {"message": {"slot": slot}}}}


@asynccontextmanager
async def beacon_chain(*nodes: FakeBeacon, options: BeaconOptions = QUICK) -> AsyncIterator[BeaconChain]:
    """The client over these nodes, first one preferred, with a key in each URL and the clock at the head."""
    async with AsyncExitStack() as stack:
        urls = []
        for node in nodes:
            urls.append(f"{await node.start()}/{SECRET}")
            stack.push_async_callback(node.stop)
        now_s = GENESIS_S + 12 * SLOTS_PER_EPOCH * SLOT_S
        yield await stack.enter_async_context(BeaconChain(urls, options, clock=lambda: now_s))


async def hang(_: web.BaseRequest) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError


def ssz_state(records: list[ValidatorRecord], roots: int, rng: random.Random, slot: int = 88) -> bytes:
    """A state as far as it matters here: field by field in the order of the specification (phase 0 to Fulu)."""
    validators = b"".join(
        record.pubkey
        + record.credentials
        + struct.pack("<Q?QQQQ", 32 * 10**9, False, 0, record.activation_epoch, record.exit_epoch, FAR_FUTURE_EPOCH)
        for record in records
    )
    historical_roots, votes = rng.randbytes(64), rng.randbytes(72)
    before_offsets = [struct.pack("<Q", 1_606_824_023), GENESIS_ROOT, struct.pack("<Q", slot), rng.randbytes(16)]
    before_offsets += [rng.randbytes(112), rng.randbytes(32 * roots), rng.randbytes(32 * roots)]
    rest_of_fixed_part = 500
    size = sum(map(len, before_offsets)) + 4 + 72 + 4 + 8 + 4 + 4 + rest_of_fixed_part
    at_votes = size + len(historical_roots)
    at_validators = at_votes + len(votes)
    offsets = (size, at_votes, at_validators, at_validators + len(validators))
    first, second, third, fourth = (struct.pack("<I", offset) for offset in offsets)
    fixed = [*before_offsets, first, rng.randbytes(72), second, bytes(8), third, fourth, rng.randbytes(500)]
    return b"".join([*fixed, historical_roots, votes, validators, rng.randbytes(8 * len(records) + 300)])
