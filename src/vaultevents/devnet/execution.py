"""An execution node on loopback: Ethereum JSON-RPC over HTTP for a `Chain`, with provider limits and a fault script.

The same port speaks WebSocket: calls, and `eth_subscribe` for `newHeads`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from functools import partial
from itertools import cycle
from random import Random
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from vaultevents.devnet.blocks import PlacedLog
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.faults import BLOCK_FAULTS, LOG_FAULTS, TRANSPORT_FAULTS, WITHDRAWAL_FAULTS, Fault, Faults
from vaultevents.devnet.header import hex_data
from vaultevents.devnet.loopback import LoopbackServer, outage
from vaultevents.devnet.node import Node
from vaultevents.devnet.rpc import INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR, SERVER_ERROR, RpcError
from vaultevents.devnet.tampering import tamper_block, tamper_logs


class ExecutionServer:
    """Serves one `Node`'s view of a chain; several servers may serve the same chain.

    `node` (limits, lag, shape of logs) and `faults` may be changed while it runs. `calls` counts calls by method,
    `exchanges` HTTP requests, `subscriptions` the sockets that get new heads now. While it is `frozen` sockets
    stay open and answer pings, but get nothing.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        faults: Faults | None = None,
        max_range: int | None = None,
        max_results: int | None = None,
        limit_style: str = "infura",
        block_timestamp: bool = True,
        behind: int = 0,
    ) -> None:
        self.node = Node(chain, max_range, max_results, limit_style, block_timestamp, behind)
        self.faults = faults or Faults(chain.seed)
        self.calls: Counter[str] = Counter()
        self.exchanges = 0
        self.frozen = False
        self._subscribed: dict[asyncio.Queue[dict[str, Any]], str] = {}
        self._server = LoopbackServer(self._exchange)
        self._rendered: dict[tuple[bytes, int, bool], msgspec.Raw] = {}

    @property
    def subscriptions(self) -> int:
        return len(self._subscribed)

    async def start(self) -> str:
        """Listen on a free port; returns the URL."""
        self.node.chain.on_block.append(self._announce_head)
        return await self._server.start()

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        with contextlib.suppress(ValueError):  # stopped before
            self.node.chain.on_block.remove(self._announce_head)
        await self._server.stop()

    async def _exchange(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("upgrade", "").lower() == "websocket":
            return await self._socket(request)
        self.exchanges += 1
        body = await request.read()
        try:
            sent = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return _reply(_error(None, RpcError(PARSE_ERROR, "parse error")))
        key = "+".join(map(_key, sent)) if isinstance(sent, list) else _key(sent)
        failure = await outage(self.faults.draw(key, TRANSPORT_FAULTS), self.faults.slow_s)
        if failure is not None:
            return failure
        if isinstance(sent, list) and sent:
            return _reply([self._call(call) for call in sent])
        return _reply(self._call(sent))

    async def _socket(self, request: web.BaseRequest) -> web.StreamResponse:
        """Calls over a WebSocket, and the heads that one of them subscribes to."""
        failure = await outage(self.faults.draw("websocket", TRANSPORT_FAULTS), self.faults.slow_s)
        if failure is not None:
            return failure
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        sending = asyncio.create_task(_send(socket, outgoing))
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT and not self.frozen:
                    outgoing.put_nowait(self._socket_call(message.data, outgoing))
        finally:
            sending.cancel()
            self._subscribed.pop(outgoing, None)
        return socket

    def _socket_call(self, text: str, outgoing: asyncio.Queue[dict[str, Any]]) -> dict[str, Any]:
        try:
            sent = msgspec.json.decode(text)
        except msgspec.DecodeError:
            return _error(None, RpcError(PARSE_ERROR, "parse error"))
        if isinstance(sent, dict) and sent.get("method") == "eth_subscribe":
            if sent.get("params") != ["newHeads"]:
                return _error(sent.get("id"), RpcError(INVALID_PARAMS, "only newHeads is supported"))
            name = self._subscribed.setdefault(outgoing, hex(len(self._subscribed) + 1))
            return {"jsonrpc": "2.0", "id": sent.get("id"), "result": name}
        return self._call(sent)

    def _announce_head(self) -> None:
        head = self.node.block_at("latest")
        if self.frozen or head is None:
            return
        for outgoing, name in self._subscribed.items():
            announced = {"subscription": name, "result": head.header.to_json() | {"hash": hex_data(head.hash)}}
            outgoing.put_nowait({"jsonrpc": "2.0", "method": "eth_subscription", "params": announced})

    def _call(self, sent: object) -> dict[str, Any]:
        call = sent if isinstance(sent, dict) else {}
        method, params, call_id = call.get("method"), call.get("params") or [], call.get("id")
        try:
            if not isinstance(method, str):
                raise RpcError(INVALID_REQUEST, "invalid request")
            if not isinstance(params, list):
                raise RpcError(INVALID_PARAMS, "non-array args")
            self.calls[method] += 1
            return {"jsonrpc": "2.0", "id": call_id, "result": self._result(method, params, _key(call))}
        except RpcError as error:
            return _error(call_id, error)

    def _result(self, method: str, params: list[Any], key: str) -> Any:
        if self.faults.draw(key, (Fault.ERROR,)):
            raise RpcError(SERVER_ERROR, "internal error")
        if method == "eth_getLogs":
            return self._logs(params[0] if params else None, key)
        result = self.node.call(method, params)
        if method in ("eth_chainId", "net_version") and self.faults.draw(key, (Fault.WRONG_CHAIN_ID,)):
            other = self.node.chain.chain_id + 1
            return hex(other) if method == "eth_chainId" else str(other)
        if method in ("eth_getBlockByNumber", "eth_getBlockByHash") and result is not None:
            return self._block(result, key)
        return result

    def _logs(self, query: object, key: str) -> list[Any]:
        found = self.node.logs(query)
        kind = self.faults.draw(key, LOG_FAULTS) if found else None
        if kind is None:
            return [self._raw(placed) for placed in found]
        return tamper_logs(kind, [self.node.log_json(placed) for placed in found])

    def _block(self, block: dict[str, Any], key: str) -> dict[str, Any] | None:
        genesis = block["number"] == "0x0"
        kind = self.faults.draw(key, (Fault.WRONG_GENESIS,) if genesis else (*BLOCK_FAULTS, *_withdrawal_faults(block)))
        return block if kind is None else tamper_block(kind, block)

    def _raw(self, placed: PlacedLog) -> msgspec.Raw:
        """The JSON of a log, kept for the logs that are themselves kept (those of the filler are not)."""
        key = (placed.block.hash, placed.log_index, self.node.block_timestamp)
        raw = self._rendered.get(key)
        if raw is None:
            raw = msgspec.Raw(msgspec.json.encode(self.node.log_json(placed)))
            if placed.tx_index < len(placed.block.transactions):
                self._rendered[key] = raw
        return raw


class Balancer(LoopbackServer):
    """One URL behind which each exchange goes to any of several servers, as providers do; only it is started.

    Without a seed they take turns.
    """

    def __init__(self, seed: int | None, *servers: ExecutionServer) -> None:
        rng = Random(f"{seed}/balancer")  # noqa: S311 (a simulation must repeat)
        self._choose = partial(next, cycle(servers)) if seed is None else partial(rng.choice, servers)
        super().__init__(self._exchange_of_one)

    async def _exchange_of_one(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._choose()._exchange(request)


async def _send(socket: web.WebSocketResponse, outgoing: asyncio.Queue[dict[str, Any]]) -> None:
    while True:
        await socket.send_str(msgspec.json.encode(await outgoing.get()).decode())


def _withdrawal_faults(block: dict[str, Any]) -> tuple[Fault, ...]:
    """Those that a block's withdrawals are numerous enough for."""
    needed = {Fault.NO_WITHDRAWALS: 0, Fault.WITHDRAWAL_GAP: 3, Fault.WITHDRAWAL_TWICE: 1}
    return tuple(kind for kind in WITHDRAWAL_FAULTS if len(block["withdrawals"]) >= needed[kind])


def _key(call: object) -> str:
    """What a call asks for: without its id, which differs from one attempt to the next."""
    if not isinstance(call, dict):
        return repr(call)
    return f"{call.get('method')}{json.dumps(call.get('params'), sort_keys=True)}"


def _error(call_id: object, error: RpcError) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": call_id, "error": error.to_json()}


def _reply(answer: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
