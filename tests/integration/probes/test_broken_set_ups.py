"""`check` on a set-up that works, and on broken ones: the fault is named, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from check_fixtures import MASTER_KEY, AnsweringNode, Example, SetUp, free_port, make_example, running_set_up
from simulation_fixtures import register
from vaultevents.core.findings import Finding, verdict
from vaultevents.core.sealing import NONCE_BYTES, Secret, parse_master_key
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.core.units import Address, Hash32, checksum
from vaultevents.core.webhooks import Webhook
from vaultevents.devnet.beaconnode import BeaconNode
from vaultevents.devnet.certificates import Authority
from vaultevents.devnet.chain import At, Chain, Lag
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.gateway import Trouble
from vaultevents.devnet.receivers import Receivers
from vaultevents.probes import execution
from vaultevents.store import webhooks
from vaultevents.store.pool import open_database
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.integration

SCHEMA = f"checked_{uuid4().hex}"
NOBODY = checksum(Address(bytes(19) + b"\x07"))
TAIL = 15
"""So many blocks of the fork are others than those of the chain."""


@pytest.fixture(scope="module")
def example(postgres18: ServerAddress) -> Example:
    """A chain, and a database in which its vaults and a webhook are registered."""
    made = make_example()

    async def prepare() -> None:
        database = await open_database(postgres18.connect_kwargs(), schema=SCHEMA)
        await register(database, made.simulation)
        account_id = made.simulation.registrations[0].account_id
        webhook = Webhook("wh-1", account_id, "https://127.0.0.1/", None, None, active=True)
        secret, nonce = Secret(new_secret(secrets.token_bytes(SECRET_BYTES))), secrets.token_bytes(NONCE_BYTES)
        await webhooks.create_webhook(database, webhook, secret, parse_master_key(MASTER_KEY), nonce)
        await database.close()

    asyncio.run(prepare())
    return made


@pytest.fixture(scope="module")
def fork() -> Example:
    """The same chain with another end, which is final there, too."""
    made = make_example()
    chain = made.simulation.chain
    chain.finalized = Lag(TAIL + 5)
    chain.reorg(TAIL, [()] * TAIL)
    chain.finalized = Lag(2)
    return made


@pytest.fixture
async def set_up(example: Example, tmp_path: Path, postgres18: ServerAddress) -> AsyncIterator[SetUp]:
    async with running_set_up(example, tmp_path, postgres18.dsn, SCHEMA) as made:
        yield made


def failures(findings: list[Finding]) -> set[str]:
    return {finding.subject for finding in findings if finding.result == "failed"}


def text_of(findings: list[Finding]) -> str:
    return "\n".join(finding.line() for finding in findings)


async def test_a_set_up_that_works(set_up: SetUp) -> None:
    receivers = Receivers(set_up.directory)
    await receivers.start()
    set_up.set("operator", webhook_url=receivers.hook("operator").url)
    set_up.set("delivery", ca_file=str(receivers.ca_path))
    set_up.set("", operator_secret=new_secret(bytes(SECRET_BYTES)))
    try:
        findings = await set_up.check()
    finally:
        await receivers.stop()
    assert failures(findings) == set(), text_of(findings)
    subjects = {finding.subject for finding in findings if finding.result == "ok"}
    parts = ("", " head", " finality", " logs", " receipts")
    of_nodes = {set_up.names[node] + part for node in ("node0", "node1") for part in parts}
    beacon_parts = ("", " head", " blocks", " execution chain", " validators", " validator list")
    of_beacon = {set_up.names["beacon"] + part for part in beacon_parts}
    assert subjects >= of_nodes | of_beacon | {set_up.names[name] for name in ("gateway0", "gateway1", "socket")}
    assert subjects >= {
        *("database", "database role", "database writes", "database clock", "master key", "master key file"),
        *("nodes agree", "contracts.lido_locator", "contracts.lazy_oracles", "contracts.wrapper_factory"),
        *("present oracle", "operator webhook", "disk", "api", "console", "trust", "delivery.ca_file"),
        *(f"start blocks at {set_up.names[node]}" for node in ("at0", "at1")),
    }
    assert {finding.subject for finding in findings if finding.result == "warning"} <= {"resolver"}
    assert "opens the stored secrets (1 were tried)" in text_of(findings)


Break = Callable[[SetUp, Example, AsyncExitStack], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """A broken set-up: what is done to it, the subjects that fail or get a warning, and a part of their lines."""

    name: str
    change: Break
    line_part: str
    failing: tuple[str, ...] = ()
    warning: tuple[str, ...] = ()


CASES: list[Case] = []


def case(name: str, line_part: str, *failing: str, warning: tuple[str, ...] = ()) -> Callable[[Break], Break]:
    """Register a broken set-up."""

    def add(change: Break) -> Break:
        CASES.append(Case(name, change, line_part, failing, warning))
        return change

    return add


@case(
    "a node of another chain id",
    "it is of chain 560049, and the configuration is for hoodi (chain 560048). Correct execution.urls",
    "{node1}",
    warning=("nodes agree",),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.nodes[1].faults.rates[Fault.WRONG_CHAIN_ID] = 1.0


@case("a node with another block 0", "it belongs to another network", "{node1}", warning=("nodes agree",))
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.nodes[1].node = AnsweringNode(Chain(98, chain_id=560048), {})


@case(
    "the network's block 0 is known, and is another one",
    "it belongs to another network",
    *("{node0}", "{node1}", "contracts.lido_locator", "contracts.lazy_oracles", "contracts.wrapper_factory"),
    "present oracle",
    warning=("nodes agree", "{beacon} execution chain", "{gateway0}", "{gateway1}"),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.network = replace(set_up.network, genesis_hash=Hash32(bytes(32)))


@case(
    "both execution nodes are down",
    "cannot be reached (ClientConnectorError)",
    *("{node0}", "{node1}", "{socket}", "start blocks at {at0}", "start blocks at {at1}", "contracts.lido_locator"),
    *("contracts.lazy_oracles", "contracts.wrapper_factory", "present oracle"),
    warning=("nodes agree", "{beacon} execution chain", "{gateway0}", "{gateway1}"),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    for node in set_up.nodes:
        await node.stop()


@case(
    "a node without the finalized tag",
    "does not know its finalized block",
    "{node1}",
    warning=("nodes agree", "start blocks at {at1}"),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.answering(1).unknown_tags = ("finalized",)


@case(
    "both nodes have pruned the start blocks",
    "keeps receipts from block 100 on. Name a node that keeps blocks from 1 on with their receipts",
    *("start blocks at {at0}", "start blocks at {at1}"),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    for node in set_up.nodes:
        node.node.oldest_receipts = 100


@case("one of two nodes has pruned them", "keeps receipts from block 100 on", warning=("start blocks at {at1}",))
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.nodes[1].node.oldest_receipts = 100


@case("no eth_getBlockReceipts", "read by eth_getTransactionReceipt", warning=("{node1} receipts",))
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.nodes[1].node.missing_methods = frozenset({"eth_getBlockReceipts"})


@case(
    "no receipts at all",
    "gives neither the receipts of block",
    "{node1} receipts",
    warning=("start blocks at {at1}",),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.nodes[1].node.missing_methods = frozenset({"eth_getBlockReceipts", "eth_getTransactionReceipt"})


@case("a small limit of eth_getLogs", "eth_getLogs takes 100 blocks at once, not the 10000", warning=("{node1} logs",))
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.nodes[1].node.max_range = 100


@case("no eth_getLogs", "cannot give the logs of blocks", "{node1} logs", warning=("start blocks at {at1}",))
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.nodes[1].node.missing_methods = frozenset({"eth_getLogs"})


@case("a stale head", "so it does not follow the chain. See why the node", "{node1} head")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.nodes[1].node.behind = 40


@case("a node that is syncing", "it is syncing, at block 16 of 153. Wait until it has caught up.", "{node1} head")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.answering(1).syncing = {"startingBlock": "0x0", "currentBlock": "0x10", "highestBlock": "0x99"}


@case(
    "stalled finality",
    "See whether the network finalizes",
    *("{node0} finality", "{node1} finality", "{beacon}"),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    chain = set_up.example.simulation.chain
    stack.callback(setattr, chain, "finalized", chain.finalized)
    chain.finalized = At(20)


@case("nodes on two forks", "nothing is sent until they agree. Find out which one follows the chain", "nodes agree")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.nodes[1].node = AnsweringNode(fork.simulation.chain, fork.answers)


@case("a beacon node of another network", "which is not that of hoodi", "{beacon}")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    root = Hash32(set_up.example.simulation.beacon.genesis_validators_root)
    set_up.network = replace(set_up.network, genesis_validators_root=root)
    set_up.beacon.faults.rates[Fault.OTHER_NETWORK] = 1.0


@case("a beacon node of another execution chain", "its network belongs to chain 1,", "{beacon}")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.beacon.spec = {"DEPOSIT_CHAIN_ID": "1"}


@case("a beacon node that is syncing", "slots behind. Wait until it has caught up.", "{beacon}")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.beacon.faults.rates[Fault.SYNCING] = 1.0


@case("a beacon node that is down", "cannot be reached (ClientConnectorError)", "{beacon}")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    await set_up.beacon.stop()


@case(
    "no validator list, but validators by public key",
    "HTTP status 403 (not available on this plan); validators are found by the deposits",
    warning=("{beacon} validator list",),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.beacon.refused = {"all validators": 403}


@case(
    "no validator list, nor validators by public key",
    "so validators of vaults cannot be found. Name a node",
    "{beacon} validator list",
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.beacon.refused = {"all validators": 404, "by public key": 404}


@case("no validator list, which is required", 'or set beacon.validators to "auto"', "{beacon} validator list")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.beacon.refused = {"all validators": 403}
    set_up.set("beacon", validators="list")


@case(
    "validators by deposits, by choice",
    'beacon.validators is "deposits"; validators are found by the deposits',
    warning=("{beacon} validator list",),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.set("beacon", validators="deposits")


@case("no POST of validators", "so validators are asked by GET", warning=("{beacon} validators",))
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.beacon.post = False


@case(
    "a beacon node without blocks",
    "it does not give the block of slot",
    "{beacon} blocks",
    warning=("{beacon} execution chain",),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.beacon.refused = {"block": 404, "blinded block": 404}


@case(
    "the beacon node follows another fork",
    "Find out which of them follows the chain",
    "{beacon} execution chain",
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.beacon.node = BeaconNode(fork.simulation.beacon)


@case("the locator names another oracle", "which is not in contracts.lazy_oracles. Add it", "present oracle")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    locator = "0x" + set_up.example.locator.hex()
    for number in range(2):
        set_up.answering(number).answers[locator, "0x2e39045c"] = bytes(31) + b"\x07"


@case(
    "no contract at an address",
    "has no code on this chain. Correct the address.",
    "contracts.wrapper_factory",
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.set("contracts", wrapper_factory=NOBODY)


@case(
    "both execution nodes and a gateway are down",
    "Connect call failed",
    *("{node0}", "{node1}", "{socket}", "start blocks at {at0}", "start blocks at {at1}", "contracts.lido_locator"),
    *("contracts.lazy_oracles", "contracts.wrapper_factory", "present oracle", "{gateway0}"),
    warning=("nodes agree", "{beacon} execution chain", "{gateway1}"),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    await set_up.gateways[0].stop()
    for node in set_up.nodes:
        await node.stop()


@case("a gateway that is down", "cannot be reached (ClientConnectorError). Name another gateway", "{gateway0}")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    await set_up.gateways[0].stop()


@case("a gateway that gives other bytes", "bytes that are not the file", "{gateway1}")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.gateways[1].trouble = Trouble.WRONG_FILE


@case("a WebSocket of another chain", "it is of chain 5, and the configuration is for hoodi", "{socket}")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    other = ExecutionServer(Chain(5, chain_id=5))
    url = await other.start()
    stack.push_async_callback(other.stop)
    set_up.set("execution", websocket_urls=[url.replace("http", "ws")])
    announcing = asyncio.create_task(announce(other))
    stack.callback(announcing.cancel)


async def announce(server: ExecutionServer) -> None:
    while True:
        for callback in server.node.chain.on_block:
            callback()
        await asyncio.sleep(0.05)


@case("a WebSocket that announces nothing", "has announced no block for 0.3 s", "{socket}")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(execution, "ANNOUNCED_WITHIN_S", 0.3)
    stack.callback(patch.undo)
    set_up.example.simulation.chain.on_block.clear()


@case(
    "a database that is down",
    "Start it, or fix database_url",
    "database",
    warning=("master key", "start blocks"),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.set("", database_url=f"postgresql://me:s3cret@127.0.0.1:{free_port()}/db")


@case("a database user without any right", "Grant it CREATE", "database", warning=("master key", "start blocks"))
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    await login_as_other(set_up, stack, "")


@case(
    "a database user without one right",
    "lacks insert on events. Let it own the schema",
    "database",
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    await login_as_other(
        set_up,
        stack,
        "grant usage, create on schema S to R; grant all on all tables in schema S to R;"
        " grant all on all sequences in schema S to R; grant vaultevents_api to R; revoke insert on events from R",
    )


async def login_as_other(set_up: SetUp, stack: AsyncExitStack, grants: str) -> None:
    """Let the service log in as a new user with these rights on its schema."""
    admin = await asyncpg.connect(set_up.dsn, server_settings={"search_path": set_up.schema})
    stack.push_async_callback(admin.close)
    role = f"other_{uuid4().hex[:8]}"
    await admin.execute(f"create role {role} login password 'x'")
    stack.push_async_callback(admin.execute, f"drop owned by {role}; drop role {role}")
    if grants:
        await admin.execute(grants.replace(" S ", f" {set_up.schema} ").replace(" R", f" {role}"))
    login, rest = set_up.dsn.split("@", 1)
    set_up.set("", database_url=f"{login.split('//')[0]}//{role}:x@{rest}")


@case(
    "a database of a newer version",
    "Install that version or a newer one",
    "database",
    warning=("master key", "start blocks"),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    await execute(set_up, "insert into migrations (number, name, sha256) values (99, '0099_later.sql', '\\x00')")
    stack.push_async_callback(execute, set_up, "delete from migrations where number = 99")


@case("a database whose clock is wrong", "s ahead of that of this host. Set both clocks (NTP).", "database clock")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    (before,) = await execute(set_up, "select pg_get_functiondef('db_now'::regproc)")
    await execute(
        set_up,
        "create or replace function db_now() returns timestamptz language sql volatile as"
        " $$ select clock_timestamp() + interval '1 minute' $$",
    )
    stack.push_async_callback(execute, set_up, before)


async def execute(set_up: SetUp, sql: str) -> list[str]:
    connection = await asyncpg.connect(set_up.dsn, server_settings={"search_path": set_up.schema})
    try:
        return [row[0] for row in await connection.fetch(sql)]
    finally:
        await connection.close()


@case("another master key", "secrets in this database are sealed with the master key", "master key")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.set("", master_key="6b" * 32)


@case("a master key that others can read", "Run chmod 600", warning=("master key file",))
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    path = set_up.directory / "key"
    path.write_text(MASTER_KEY)
    path.chmod(0o644)
    del set_up.values["master_key"]
    set_up.set("", master_key_file=str(path))


@case("the port of the API is taken", "(Address already in use). Name another address in api.host", "api")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    set_up.set("api", port=taken.getsockname()[1])


@case("the port of the console is taken", "Name another address in console.host", "console")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    set_up.set("console", port=taken.getsockname()[1])


@case("an expired certificate of the API", "Renew it.", "api certificate")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    Authority(set_up.directory).server("localhost", expired=True)
    pem = set_up.directory / "server.pem"
    set_up.set("api", certificate_file=str(pem), key_file=str(pem))


@case("the API on the network without TLS", "so API keys can be read on the way", warning=("api proxy",))
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.set("api", host="0.0.0.0")


@case(
    "the same node twice",
    "the same execution node URL is configured twice",
    "execution",
    *("contracts.lido_locator", "contracts.lazy_oracles", "contracts.wrapper_factory", "present oracle"),
    warning=("{beacon} execution chain", "{gateway0}", "{gateway1}"),
)
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.set("execution", urls=[set_up.urls["node 0"]] * 2)


@case("a proxy that is down", "Start the proxy, or correct", "delivery.proxy_url")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.set("delivery", proxy_url=f"http://127.0.0.1:{free_port()}")


@case("no certificate authority", "cannot be used (No such file or directory).", "delivery.ca_file")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.set("delivery", ca_file=str(set_up.directory / "absent.pem"))


@case("an operator's webhook that is down", "it cannot be reached", "operator webhook")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.set("operator", webhook_url=f"https://127.0.0.1:{free_port()}/")
    set_up.set("", operator_secret=new_secret(bytes(SECRET_BYTES)))


@case("a full disk", "MiB are free", "disk")
async def _(set_up: SetUp, fork: Example, stack: AsyncExitStack) -> None:
    set_up.set("", data_dir=str(stack.enter_context(small_disk(set_up.directory / "disk"))))


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """1 MiB: too little for the files of reports."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("broken", CASES, ids=lambda broken: broken.name.replace(" ", "-"))
async def test_a_broken_set_up(set_up: SetUp, fork: Example, broken: Case) -> None:
    async with AsyncExitStack() as stack:
        await broken.change(set_up, fork, stack)
        findings = await set_up.check()
    names, text = set_up.names, text_of(findings)
    expected = {subject.format(**names) for subject in broken.failing}
    warned = {subject.format(**names) for subject in broken.warning}
    assert failures(findings) == expected, text
    warnings = {finding.subject for finding in findings if finding.result == "warning"}
    assert warnings - {"resolver"} == warned, text
    concerned = [finding for finding in findings if finding.subject in expected | warned]
    assert any(broken.line_part in finding.line() for finding in concerned), text_of(concerned)
    assert all(finding.advice for finding in findings if finding.result == "failed"), text_of(concerned)
    assert verdict(findings).startswith("Everything" if not expected else f"{len(expected)} of {len(findings)} checks")
    print(f"TABLE {broken.name} -> {next(found.line() for found in concerned if broken.line_part in found.line())}")
