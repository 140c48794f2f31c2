"""Transactions as they are hashed and shown (EIP-2718, types 0 to 4): a header commits to them and to their hashes.

Signatures have the right form, but nobody made them.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from eth_hash.auto import keccak

from vaultevents.devnet.encoding import minimal, rlp_encode
from vaultevents.devnet.header import hex_data

LEGACY, ACCESS_LIST, DYNAMIC_FEE, BLOB, SET_CODE = range(5)
SENDER = bytes.fromhex("00000000000000000000000000000000000000aa")
GAS_PRICE_WEI = 10**9

_ADDRESS = bytes.fromhex("00000000000000000000000000000000000000ac")
_GAS = 90_000


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a sender signs. `kind` is its type; one that is not known here has the fields of type 2."""

    kind: int
    chain_id: int
    seed: int
    nonce: int
    creates: bool = False

    def encoded(self) -> bytes:
        """Return the bytes whose Keccak is the transaction's hash."""
        prefix = bytes([self.kind]) if self.kind else b""
        return prefix + rlp_encode(list(self.fields().values()))

    def hash(self) -> bytes:
        """Return the transaction's hash."""
        return keccak(self.encoded())

    def fields(self) -> dict[str, Any]:
        """Return all fields in the order in which they are encoded, under their JSON-RPC names."""
        chain_id = {} if self.kind == LEGACY else {"chainId": self.chain_id}
        dynamic = {"maxPriorityFeePerGas": 1, "maxFeePerGas": 2 * GAS_PRICE_WEI}
        price = {"gasPrice": GAS_PRICE_WEI} if self.kind in (LEGACY, ACCESS_LIST) else dynamic
        to = b"" if self.creates else SENDER
        common = {"gas": _GAS, "to": to, "value": 0, "input": self.nonce.to_bytes(4)}
        return {**chain_id, "nonce": self.nonce, **price, **common, **self._lists(), **self._signature()}

    def _lists(self) -> dict[str, Any]:
        if self.kind == LEGACY:
            return {}
        keys = [minimal(self.nonce).rjust(32, b"\x01")] if self.nonce % 8 == 3 else []
        lists: dict[str, Any] = {"accessList": [[_ADDRESS, keys]] if self.nonce % 4 == 3 else []}
        if self.kind == BLOB:
            lists |= {"maxFeePerBlobGas": 1, "blobVersionedHashes": [b"\x01" + keccak(b"blob")[1:]]}
        if self.kind == SET_CODE:
            signed = [self.nonce % 2, *self._numbers("authorization")]
            lists["authorizationList"] = [[self.chain_id, _ADDRESS, self.nonce, *signed]]
        return lists

    def _signature(self) -> dict[str, int]:
        r, s = self._numbers("signature")
        parity = self.nonce % 2
        if self.kind == LEGACY:
            return {"v": 35 + 2 * self.chain_id + parity, "r": r, "s": s}
        return {"yParity": parity, "r": r, "s": s}

    def _numbers(self, use: str) -> tuple[int, int]:
        """Below half of the order of the curve, as s has to be (EIP-2)."""
        digests = (blake2b(f"{self.seed}/{use}/{name}/{self.nonce}".encode(), digest_size=32) for name in "rs")
        r, s = (int.from_bytes(digest.digest()) >> 2 for digest in digests)
        return r, s

    def to_json(self) -> dict[str, Any]:
        """Return the fields in JSON-RPC form, without the place in a block."""
        shown = {name: _shown(name, value) for name, value in self.fields().items()}
        if "yParity" in shown:
            shown["v"] = shown["yParity"]
            shown.setdefault("gasPrice", hex(GAS_PRICE_WEI))
        return {"type": hex(self.kind), **shown, "from": hex_data(SENDER)}


def _shown(name: str, value: Any) -> Any:
    match name, value:
        case "to", b"":
            return None
        case "accessList", list():
            return [
                {"address": hex_data(address), "storageKeys": [hex_data(key) for key in keys]}
                for address, keys in value
            ]
        case "authorizationList", list():
            names = ("chainId", "address", "nonce", "yParity", "r", "s")
            return [{part: _shown(part, item) for part, item in zip(names, signed, strict=True)} for signed in value]
        case _, list():
            return [_shown(name, item) for item in value]
        case _, bytes():
            return hex_data(value)
    return hex(value)
