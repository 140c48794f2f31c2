"""A beacon node and an execution node for one chain of the executable specification, on one loopback URL.

The head can be set: each block keeps the state after it, so finality moves with it. It is no network client: error
bodies are the specified `{code, message}`, a state by the slot of a missed block is 404, filters by status are
refused, and SSZ is offered for the finalized state only (`/eth/v2/debug/beacon/states/finalized`).
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import msgspec
from aiohttp import web

from specchain import Block as SpecBlock
from specchain import Checkpoint as SpecCheckpoint
from specchain import SpecChain, Validator
from vaultevents.devnet.loopback import LoopbackServer

FAR_FUTURE_EPOCH = 2**64 - 1
MOST_IDS_PER_GET = 64

_SSZ = "application/octet-stream"
_RESOURCE = re.compile(r"/eth/v1/beacon/(states|headers)/([^/]+)(?:/([^/]+))?(?:/([^/]+))?")
_BLOCK = re.compile(r"/eth/(?:v2/beacon/blocks|v1/beacon/(blinded_blocks))/([^/]+)")
_HEX_NUMBER = re.compile(r"0x(0|[1-9a-f][0-9a-f]*)")
_VALIDATOR_ID = re.compile(r"[0-9]{1,20}|0x[0-9a-f]{96}")

Json = dict[str, Any]


class Refusal(Exception):
    """An answer of the Beacon API that is not 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RpcError(Exception):
    """An error answer of the execution node."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class SpecNode:
    """Serves a chain from a thread of its own, also while the test waits for something else.

    `head_slot` may be set at any time: the head is the last block up to it. `calls` counts requests by path and method.
    """

    def __init__(self, chain: SpecChain, head_slot: int | None = None, *, contracts: Sequence[bytes] = ()) -> None:
        self.chain = chain
        self.head_slot = chain.last_slot if head_slot is None else head_slot
        self.calls: Counter[str] = Counter()
        self.url = ""
        self._contracts = frozenset(contracts)
        self._started: Future[tuple[str, Callable[[], object]]] = Future()
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="specnode", daemon=True)

    def __enter__(self) -> SpecNode:
        self._thread.start()
        self.url, self._stop = self._started.result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._thread.join(10)

    @property
    def head(self) -> SpecBlock:
        return self.chain.head(self.head_slot)

    @property
    def final(self) -> SpecBlock:
        """The block of the finalized checkpoint; that of genesis before there is one."""
        return self.chain.block_of(self.head.finalized)

    @property
    def now_s(self) -> int:
        """The time at which `head_slot` begins, for a clock that is handed in."""
        return self.chain.time_s(self.head_slot)

    async def _serve(self) -> None:
        server, stopped, loop = LoopbackServer(self._exchange), asyncio.Event(), asyncio.get_running_loop()
        self._started.set_result((await server.start(), lambda: loop.call_soon_threadsafe(stopped.set)))
        await stopped.wait()
        await server.stop()

    async def _exchange(self, request: web.BaseRequest) -> web.StreamResponse:
        content = await request.read()
        if request.path == "/":
            sent = msgspec.json.decode(content)
            return _reply([self._rpc(delivery) for delivery in sent] if isinstance(sent, list) else self._rpc(sent))
        self.calls[f"{request.method} {request.path}"] += 1
        try:
            if request.path == "/eth/v2/debug/beacon/states/finalized":
                return self._state(request)
            return _reply(self._beacon(request, msgspec.json.decode(content) if content else None))
        except Refusal as refusal:
            return _reply({"code": refusal.status, "message": str(refusal)}, refusal.status)

    # The beacon node

    def _beacon(self, request: web.BaseRequest, body: Any) -> Json:
        chain = self.chain
        match request.path:
            case "/eth/v1/node/syncing":
                lag = {"head_slot": str(self.head.slot), "sync_distance": str(self.head_slot - self.head.slot)}
                return {"data": {**lag, "is_syncing": False, "is_optimistic": False, "el_offline": False}}
            case "/eth/v1/node/version":
                return {"data": {"version": "eth-consensus-specs/fulu"}}
            case "/eth/v1/config/spec":
                return {"data": chain.config}
            case "/eth/v1/beacon/genesis":
                return {
                    "data": {
                        "genesis_time": str(chain.time_s(0)),
                        "genesis_validators_root": _hex(chain.genesis_validators_root),
                        "genesis_fork_version": chain.config["GENESIS_FORK_VERSION"],
                    }
                }
        if found := _BLOCK.fullmatch(request.path):
            blinded, identifier = found.groups()
            block = self._block(identifier)
            return {"version": "fulu", **self._about(block, _signed_block(block, blinded=bool(blinded)))}
        if not (found := _RESOURCE.fullmatch(request.path)):
            raise Refusal(404, "no such route")
        kind, identifier, part, detail = found.groups()
        block = self._block(identifier)
        match kind, part, detail:
            case "headers", None, None:
                return self._about(block, _header(block))
            case "states", "finality_checkpoints", None:
                return self._about(block, _checkpoints(block))
            case "states", "validators", None:
                return self._about(block, self._validators(block, _ids(request, body)))
            case "states", "validators", str() if validators := self._validators(block, [detail]):
                return self._about(block, validators[0])
        raise Refusal(404, "no such route or validator")

    def _state(self, request: web.BaseRequest) -> web.Response:
        if _SSZ not in request.headers.get("accept", ""):
            raise Refusal(406, "the state is only given as application/octet-stream")
        state, headers = self.chain.states[self.final.slot], {"Eth-Consensus-Version": "fulu"}
        return web.Response(body=state, content_type=_SSZ, headers=headers)

    def _about(self, block: SpecBlock, data: Any) -> Json:
        return {"execution_optimistic": False, "finalized": block.slot <= self.final.slot, "data": data}

    def _block(self, identifier: str) -> SpecBlock:
        """The block of an identifier, up to the head."""
        match identifier:
            case "head":
                return self.head
            case "finalized":
                return self.final
            case "justified":
                return self.chain.block_of(self.head.current_justified)
            case "genesis":
                return self.chain.blocks[0]
        if not re.fullmatch(r"[0-9]{1,20}|0x[0-9a-f]{64}", identifier):
            raise Refusal(400, f"{identifier} is no slot, root or name of a block or state")
        for block in self.chain.blocks:
            roots = _hex(block.root), _hex(block.state_root)
            if identifier in (str(block.slot), *roots) and block.slot <= self.head.slot:
                return block
        raise Refusal(404, f"{identifier} not found")

    def _validators(self, block: SpecBlock, ids: Sequence[str]) -> list[Json]:
        """The records of these ids, unknown ones left out; without ids all of them."""
        if wrong := [item_id for item_id in ids if not _VALIDATOR_ID.fullmatch(item_id)]:
            raise Refusal(400, f"{wrong[0]} is no index and no public key of a validator")
        epoch = block.slot // self.chain.slots_per_epoch
        return [
            _record(index, one, epoch)
            for index, one in enumerate(block.validators)
            if not ids or str(index) in ids or _hex(one.pubkey) in ids
        ]

    # The execution node

    def _rpc(self, call: Json) -> Json:
        self.calls[call["method"]] += 1
        try:
            return {"jsonrpc": "2.0", "id": call["id"], "result": self._result(call["method"], call["params"])}
        except RpcError as error:
            return {"jsonrpc": "2.0", "id": call["id"], "error": {"code": error.code, "message": str(error)}}

    def _result(self, method: str, params: list[Any]) -> Any:
        match method, params:
            case "eth_chainId", []:
                return hex(self.chain.chain_id)
            case "eth_blockNumber", []:
                return hex(self.head.execution_number)
            case "eth_getBlockByNumber", [str(position), False]:
                return self._execution_block(self._number(position))
            case "eth_getBlockByHash", [str(block_hash), False]:
                return self._execution_block(self._number_of(block_hash))
            case "eth_getCode", [str(address), str(_)]:
                return "0xfe" if bytes.fromhex(address[2:]) in self._contracts else "0x"
            case "eth_getLogs", [{"blockHash": block_hash}]:
                if self._number_of(block_hash) is None:
                    raise RpcError(-32000, "unknown block")
                return []
            case "eth_getLogs", [dict()]:
                return []
        raise RpcError(-32601, f"the method {method} does not exist or has other parameters")

    def _number(self, position: str) -> int | None:
        head = self.head
        match position:
            case "latest" | "pending":
                return head.execution_number
            case "earliest":
                return 0
            case "safe":
                return self._number_at(head.current_justified)
            case "finalized":
                return self._number_at(head.finalized)
        if not _HEX_NUMBER.fullmatch(position):
            raise RpcError(-32602, f"{position} is no block number")
        return int(position, 16)

    def _number_at(self, checkpoint: SpecCheckpoint) -> int | None:
        return self.chain.block_of(checkpoint).execution_number if checkpoint.epoch else None

    def _number_of(self, block_hash: str) -> int | None:
        blocks = (block for block in self.chain.blocks if block.slot <= self.head.slot)
        return next((one.execution_number for one in blocks if _hex(one.execution_hash) == block_hash.lower()), None)

    def _execution_block(self, number: int | None) -> Json | None:
        if number is None or number > self.head.execution_number:
            return None
        block = self.chain.blocks[number]
        paid = [
            {
                "index": hex(withdrawal.index),
                "validatorIndex": hex(withdrawal.validator_index),
                "address": _hex(withdrawal.address),
                "amount": hex(withdrawal.amount_gwei),
            }
            for withdrawal in block.withdrawals
        ]
        return {**block.execution_header, "size": "0x400", "transactions": [], "uncles": [], "withdrawals": paid}


def _ids(request: web.BaseRequest, body: Any) -> list[str]:
    asked = body or {}
    if request.query.get("status") or asked.get("statuses"):
        raise Refusal(400, "this node does not filter by status")
    if request.method == "POST":
        return asked.get("ids") or []
    ids = [one for text in request.query.getall("id", []) for one in text.split(",")]
    if len(ids) > MOST_IDS_PER_GET:
        raise Refusal(414, f"more than {MOST_IDS_PER_GET} ids")
    return ids


def _header(block: SpecBlock) -> Json:
    message = {
        "slot": str(block.slot),
        "proposer_index": str(block.proposer_index),
        "parent_root": _hex(block.parent_root),
        "state_root": _hex(block.state_root),
        "body_root": _hex(block.body_root),
    }
    return {"root": _hex(block.root), "canonical": True, "header": {"message": message, "signature": _hex(bytes(96))}}


def _signed_block(block: SpecBlock, *, blinded: bool) -> Json:
    """The signed block, of whose body only the payload is kept."""
    payload = {"block_number": str(block.execution_number), "block_hash": _hex(block.execution_hash)}
    body = {"execution_payload_header" if blinded else "execution_payload": payload}
    message = {
        "slot": str(block.slot),
        "proposer_index": str(block.proposer_index),
        "parent_root": _hex(block.parent_root),
        "state_root": _hex(block.state_root),
        "body": body,
    }
    return {"message": message, "signature": _hex(bytes(96))}


def _checkpoints(block: SpecBlock) -> Json:
    named = {
        "previous_justified": block.previous_justified,
        "current_justified": block.current_justified,
        "finalized": block.finalized,
    }
    return {name: {"epoch": str(one.epoch), "root": _hex(one.root)} for name, one in named.items()}


def _record(index: int, one: Validator, epoch: int) -> Json:
    return {
        "index": str(index),
        "balance": str(one.balance_gwei),
        "status": _status(one, epoch),
        "validator": {
            "pubkey": _hex(one.pubkey),
            "withdrawal_credentials": _hex(one.credentials),
            "effective_balance": str(one.effective_balance_gwei),
            "slashed": one.slashed,
            "activation_eligibility_epoch": str(one.activation_eligibility_epoch),
            "activation_epoch": str(one.activation_epoch),
            "exit_epoch": str(one.exit_epoch),
            "withdrawable_epoch": str(one.withdrawable_epoch),
        },
    }


def _status(one: Validator, epoch: int) -> str:
    if epoch < one.activation_epoch:
        known = one.activation_eligibility_epoch != FAR_FUTURE_EPOCH
        return "pending_queued" if known else "pending_initialized"
    if epoch < one.exit_epoch:
        return "active_ongoing" if one.exit_epoch == FAR_FUTURE_EPOCH else "active_exiting"
    if epoch < one.withdrawable_epoch:
        return "exited_slashed" if one.slashed else "exited_unslashed"
    return "withdrawal_possible" if one.balance_gwei else "withdrawal_done"


def _hex(value: bytes) -> str:
    return "0x" + value.hex()


def _reply(answer: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(answer), content_type="application/json")
