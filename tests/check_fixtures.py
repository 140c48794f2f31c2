"""A set-up in which everything that `check` tries works, and the servers on which a test switches faults on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eth_abi.abi import encode

from vaultevents import config
from vaultevents.chain.execution.head_subscription import SCHEMES
from vaultevents.chain.upstream.redaction import node_name
from vaultevents.core.findings import Finding
from vaultevents.core.networks import Network
from vaultevents.core.units import Address, checksum
from vaultevents.devnet.acts import Publication
from vaultevents.devnet.beacon import Beacon
from vaultevents.devnet.beaconapi import BeaconServer, Call
from vaultevents.devnet.beaconnode import ApiError
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.gateway import Gateway
from vaultevents.devnet.node import UNKNOWN_BLOCK, Node
from vaultevents.devnet.rpc import METHOD_NOT_FOUND, SERVER_ERROR, RpcError
from vaultevents.devnet.simulation import Simulation
from vaultevents.probes.plan import check_all

CHAIN_ID = 560048
NETWORK = Network("hoodi", CHAIN_ID, is_public=True)
"""A public network, whose age of blocks counts, with a genesis block of the devnet."""
BLOCKS = 240
HEAD_AGE_S = 5.0
"""So old is the head by the clock of the check."""
LATEST_REPORT = "0x228aa843"
LAZY_ORACLE = "0x2e39045c"
MASTER_KEY = "5a" * 32


class AnsweringNode(Node):
    """An execution node whose contracts answer calls: `answers` by address and selector, in lower-case hex."""

    __slots__ = ("answers", "syncing", "unknown_tags")

    def __init__(self, chain: Chain, answers: dict[tuple[str, str], bytes]) -> None:
        super().__init__(chain)
        self.answers = dict(answers)
        self.syncing: Any = False
        self.unknown_tags: tuple[str, ...] = ()

    def call(self, method: str, params: list[Any]) -> Any:
        if params and isinstance(params[0], str) and params[0] in self.unknown_tags:
            raise RpcError(UNKNOWN_BLOCK, f"{params[0]} block not found")
        if method == "eth_syncing":
            return self.syncing
        if method != "eth_call":
            return super().call(method, params)
        if method in self.missing_methods:
            raise RpcError(METHOD_NOT_FOUND, "the method eth_call does not exist/is not available")
        asked = params[0]
        answer = self.answers.get((asked["to"].lower(), asked["data"][:10]))
        if answer is None:
            raise RpcError(SERVER_ERROR, "execution reverted")
        return "0x" + answer.hex()


class RefusingBeacon(BeaconServer):
    """A beacon node that refuses routes: `refused` are names of routes with the HTTP status of their answers.

    `spec` overrides entries of its configuration.
    """

    def __init__(self, beacon: Beacon) -> None:
        super().__init__(beacon)
        self.refused: dict[str, int] = {}
        self.spec: dict[str, str] = {}

    def _answer(self, call: Call, key: str) -> dict[str, Any]:
        status = self.refused.get(call.route)
        by_key = any(name.startswith("0x") for name in call.ids)
        if by_key:
            status = self.refused.get("by public key", status)
        if status is not None:
            raise ApiError(status, "not available on this plan")
        answer = super()._answer(call, key)
        if call.route == "spec":
            answer["data"] |= self.spec
        return answer


@dataclass(frozen=True, slots=True)
class Example:
    """A chain with validators, an oracle and its reports, and the calls that its contracts answer."""

    simulation: Simulation
    answers: dict[tuple[str, str], bytes]
    locator: bytes
    oracle: bytes
    factory: bytes


def make_example(seed: int = 11) -> Example:
    """Mine the chain."""
    simulation = Simulation(seed, chain=Chain(seed, chain_id=CHAIN_ID), validators=40, report_every=20)
    simulation.history(BLOCKS)
    published = [act for acts in simulation.acts.values() for act in acts if isinstance(act, Publication)]
    newest = [act for act in published if act.emitter == simulation.lazy_oracle and act.cid][-1]
    report = encode(
        ["uint256", "uint256", "bytes32", "string"], [newest.timestamp_s, newest.ref_slot, newest.root, newest.cid]
    )
    first, second, *_ = (registration.address for registration in simulation.registrations)
    oracle = simulation.lazy_oracle
    answers = {("0x" + oracle.hex(), LATEST_REPORT): report, ("0x" + first.hex(), LAZY_ORACLE): oracle.rjust(32, b"\0")}
    return Example(simulation, answers, first, oracle, second)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class SetUp:
    """Running servers over an example, and the values of a configuration that names them."""

    example: Example
    directory: Path
    dsn: str
    schema: str
    nodes: list[ExecutionServer] = field(default_factory=list)
    beacon: RefusingBeacon = field(init=False)
    gateways: list[Gateway] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    network: Network = NETWORK

    @property
    def head_s(self) -> int:
        """The time of the chain's head."""
        return self.example.simulation.chain.head.timestamp_s

    def answering(self, number: int) -> AnsweringNode:
        node = self.nodes[number].node
        assert isinstance(node, AnsweringNode)
        return node

    def set(self, table: str, **values: Any) -> None:
        """Change values of the configuration; the table "" is that of the top."""
        target = self.values.setdefault(table, {}) if table else self.values
        target.update(values)

    @property
    def names(self) -> dict[str, str]:
        """The subjects of `check` that contain a URL."""
        shown = {
            name.replace(" ", ""): f"{name.split()[0]}{' node' if name == 'beacon' else ''} {node_name(url)}"
            for name, url in self.urls.items()
        }
        socket_url = self.values["execution"]["websocket_urls"][0]
        at = {f"at{number}": node_name(self.urls[f"node {number}"]) for number in range(2)}
        return {**shown, **at, "socket": f"websocket {node_name(socket_url, SCHEMES)}"}

    def settings(self) -> config.Settings:
        return config.given(self.values, "test")

    async def check(self) -> list[Finding]:
        announcing = asyncio.create_task(self._announce())
        try:
            return await check_all(
                self.settings(), lambda done, total: None, network=self.network, clock=lambda: self.head_s + HEAD_AGE_S
            )
        finally:
            announcing.cancel()

    async def _announce(self) -> None:
        """Announce the head again and again, as if blocks came."""
        while True:
            for announce in list(self.example.simulation.chain.on_block):
                announce()
            await asyncio.sleep(0.05)


@asynccontextmanager
async def running_set_up(example: Example, directory: Path, dsn: str, schema: str) -> AsyncIterator[SetUp]:
    """Start two execution nodes, a beacon node and two gateways."""
    made = SetUp(example, directory, dsn, schema)
    chain = example.simulation.chain
    for _ in range(2):
        server = ExecutionServer(chain)
        server.node = AnsweringNode(chain, example.answers)
        made.nodes.append(server)
        made.gateways.append(Gateway(dict(example.simulation.report_files)))
    made.beacon = RefusingBeacon(example.simulation.beacon)
    async with contextlib.AsyncExitStack() as stack:
        for name, running in [
            *((f"node {number}", server) for number, server in enumerate(made.nodes)),
            *((f"gateway {number}", gateway) for number, gateway in enumerate(made.gateways)),
            ("beacon", made.beacon),
        ]:
            made.urls[name] = await running.start()  # type: ignore[attr-defined]
            stack.push_async_callback(running.stop)  # type: ignore[attr-defined]
        made.values = _values(made)
        yield made


def _values(made: SetUp) -> dict[str, Any]:
    example, urls = made.example, made.urls
    return {
        "network": "hoodi",
        "chain_id": CHAIN_ID,
        "data_dir": str(made.directory),
        "database_url": made.dsn,
        "database_schema": made.schema,
        "master_key": MASTER_KEY,
        "execution": {
            "urls": [urls["node 0"], urls["node 1"]],
            "websocket_urls": [urls["node 0"].replace("http", "ws")],
            "timeout_s": 5.0,
        },
        "beacon": {"urls": [urls["beacon"]], "timeout_s": 5.0},
        "reports": {"gateways": [urls["gateway 0"], urls["gateway 1"]]},
        "contracts": {
            "lido_locator": checksum(Address(example.locator)),
            "lazy_oracles": [checksum(Address(example.oracle))],
            "wrapper_factory": checksum(Address(example.factory)),
        },
        "delivery": {"allow": ["127.0.0.0/8:*"]},
        "api": {"port": free_port()},
        "console": {"port": free_port()},
        "metrics": {"serve": "off"},
    }
