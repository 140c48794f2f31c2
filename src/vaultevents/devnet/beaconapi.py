"""A beacon node on loopback: the part of the Beacon API that a watcher of validators needs, with a fault script."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
from aiohttp import web

from vaultevents.devnet.beacon import Beacon
from vaultevents.devnet.beaconnode import SLOT_FIELDS, ApiError, BeaconNode, Json
from vaultevents.devnet.faults import BEACON_TRANSPORT_FAULTS, RECORD_FAULTS, Fault, Faults
from vaultevents.devnet.loopback import LoopbackServer, outage
from vaultevents.devnet.tampering import tamper_beacon

_MOST_IDS_OF_GET = 64
_STREAMED_RECORDS = 256
_FINALITY_BACK_EPOCHS = 2
_REFUSALS: dict[Fault | None, tuple[int, str]] = {
    Fault.NOT_FOUND: (404, "No state found for id 'finalized'"),
    Fault.BAD_REQUEST: (400, "Invalid state id 'finalized'"),
}


class BeaconServer:
    """Serves one `BeaconNode`'s view of a beacon chain; several servers may serve the same chain.

    `node` (lag, names of the slot length), `faults`, `post`, `blinded` and `list_refusal` may be changed while it runs.
    `post` says whether validators can be asked for by POST, and `blinded` whether there is a route for blinded blocks:
    old clients answer either with 404. `list_refusal` is the status with which the list of all validators is refused,
    as by some gateways. `calls` counts calls by route, such as "header", "GET validators" and "POST validators";
    without ids these are "all validators", which are streamed.
    """

    def __init__(
        self,
        beacon: Beacon,
        *,
        faults: Faults | None = None,
        post: bool = True,
        behind: int = 0,
        slot_fields: tuple[str, ...] = SLOT_FIELDS,
        blinded: bool = True,
        list_refusal: int | None = None,
    ) -> None:
        self.node = BeaconNode(beacon, behind, slot_fields)
        self.faults = faults or Faults(beacon.chain.seed)
        self.post = post
        self.blinded = blinded
        self.list_refusal = list_refusal
        self.calls: Counter[str] = Counter()
        self._server = LoopbackServer(self._exchange)

    async def start(self) -> str:
        """Listen on a free port; returns the URL."""
        return await self._server.start()

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        await self._server.stop()

    async def _exchange(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        key = f"{request.method} {request.path_qs} {body.decode(errors='replace')}"
        kind = self.faults.draw(key, BEACON_TRANSPORT_FAULTS)
        failure = await outage(kind, self.faults.slow_s)
        if failure is not None:
            return failure
        try:
            if kind in _REFUSALS:
                raise ApiError(*_REFUSALS[kind])
            call = self._called(request, body)
            self.calls[call.route] += 1
            if call.route == "all validators" and self.list_refusal is not None:
                raise ApiError(self.list_refusal, "The list of all validators is not offered")
            answer = self._answer(call, key)
        except ApiError as error:
            return _reply(error.to_json(), error.status)
        if kind is Fault.HALF_BODY:
            return await _half(request, msgspec.json.encode(answer))
        return await _stream(request, answer) if call.route == "all validators" else _reply(answer)

    def _called(self, request: web.BaseRequest, body: bytes) -> Call:
        """The call that a request makes. Raises `ApiError`."""
        for method, path, route in _ROUTES:
            match = path.fullmatch(request.path)
            if match and method == request.method and self._has(route):
                return _parsed(Call(route, match.groups()), request, body)
        raise ApiError(404, f"Route {request.method}:{request.path_qs} not found")

    def _has(self, route: str) -> bool:
        return {"POST validators": self.post, "blinded block": self.blinded}.get(route, True)

    def _answer(self, call: Call, key: str) -> Json:
        node, ask = self.node, _HANDLERS[call.route]
        answer = ask(node, call)
        kind = self.faults.draw(key, _faults_of(call, answer, node))
        if kind is Fault.FINALITY_BACK:
            return ask(replace(node, final_epochs_back=_FINALITY_BACK_EPOCHS), call)
        return answer if kind is None else tamper_beacon(kind, answer)


@dataclass(frozen=True, slots=True)
class Call:
    """A request: its route, what stands in the path, and which validators it asks for."""

    route: str
    names: tuple[str, ...]
    ids: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()


_VALIDATORS = re.compile(r"/eth/v1/beacon/states/([^/]+)/validators")
_ROUTES = (
    ("GET", re.compile(r"/eth/v1/node/syncing"), "syncing"),
    ("GET", re.compile(r"/eth/v1/node/version"), "version"),
    ("GET", re.compile(r"/eth/v1/config/spec"), "spec"),
    ("GET", re.compile(r"/eth/v1/beacon/genesis"), "genesis"),
    ("GET", re.compile(r"/eth/v1/beacon/headers/([^/]+)"), "header"),
    ("GET", re.compile(r"/eth/v2/beacon/blocks/([^/]+)"), "block"),
    ("GET", re.compile(r"/eth/v1/beacon/blinded_blocks/([^/]+)"), "blinded block"),
    ("GET", re.compile(r"/eth/v1/beacon/execution_payload_envelopes/([^/]+)"), "envelope"),
    ("GET", re.compile(r"/eth/v1/beacon/states/([^/]+)/finality_checkpoints"), "finality_checkpoints"),
    ("GET", _VALIDATORS, "GET validators"),
    ("POST", _VALIDATORS, "POST validators"),
    ("GET", re.compile(r"/eth/v1/beacon/states/([^/]+)/validators/([^/]+)"), "validator"),
)
_LISTS = ("GET validators", "POST validators", "all validators")


def _list(node: BeaconNode, call: Call) -> Json:
    return node.validators(call.names[0], call.ids, call.statuses)


_HANDLERS: dict[str, Callable[[BeaconNode, Call], Json]] = {
    "syncing": lambda node, _: node.syncing(),
    "version": lambda node, _: node.version(),
    "spec": lambda node, _: node.spec(),
    "genesis": lambda node, _: node.genesis(),
    "header": lambda node, call: node.header(call.names[0]),
    "block": lambda node, call: node.block(call.names[0], blinded=False),
    "blinded block": lambda node, call: node.block(call.names[0], blinded=True),
    "envelope": lambda node, call: node.envelope(call.names[0]),
    "finality_checkpoints": lambda node, call: node.finality_checkpoints(call.names[0]),
    "validator": lambda node, call: node.validator(*call.names),
    **dict.fromkeys(_LISTS, _list),
}


def _parsed(call: Call, request: web.BaseRequest, body: bytes) -> Call:
    """With the ids and statuses of a list of validators. Raises `ApiError`."""
    match call.route:
        case "GET validators":
            ids, statuses = tuple(request.query.getall("id", ())), tuple(request.query.getall("status", ()))
            if len(ids) > _MOST_IDS_OF_GET:
                raise ApiError(414, f"More than {_MOST_IDS_OF_GET} ids")
        case "POST validators":
            ids, statuses = _posted(body)
        case _:
            return call
    return Call(call.route if ids else "all validators", call.names, ids, statuses)


def _posted(body: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        sent = msgspec.json.decode(body, type=dict[str, list[str] | None])
    except msgspec.DecodeError as error:
        raise ApiError(400, f"body: {error}") from None
    return tuple(sent.get("ids") or ()), tuple(sent.get("statuses") or ())


def _faults_of(call: Call, answer: Json, node: BeaconNode) -> tuple[Fault, ...]:
    """The faults that can strike a right answer."""
    match call.route:
        case "syncing":
            return (Fault.SYNCING, Fault.OPTIMISTIC)
        case "genesis":
            return (Fault.OTHER_NETWORK,)
        case "version" | "spec":
            return ()
    final = call.names[0] == "finalized" or call.route == "finality_checkpoints"
    backwards = (Fault.FINALITY_BACK,) if final and node.finality().epoch else ()
    if call.route in _LISTS:
        return (*backwards, Fault.OPTIMISTIC, *(RECORD_FAULTS if answer["data"] else ()))
    return (*backwards, Fault.OPTIMISTIC, *((Fault.OTHER_PUBKEY,) if call.route == "validator" else ()))


def _reply(answer: Json, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), status=status, content_type="application/json")


async def _stream(request: web.BaseRequest, answer: Json) -> web.StreamResponse:
    """A list that is sent while it is written, without its length, as nodes send all validators."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    records = answer["data"]
    head, tail = msgspec.json.encode({**answer, "data": []}).rsplit(b"]", 1)
    await response.write(head)
    for first in range(0, len(records), _STREAMED_RECORDS):
        part = msgspec.json.encode(records[first : first + _STREAMED_RECORDS])[1:-1]
        await response.write(b"," + part if first else part)
    await response.write(b"]" + tail)
    return response


async def _half(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    """The first half of an answer, then the end of the connection."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.close()
    return response
