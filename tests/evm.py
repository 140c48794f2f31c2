"""A real EVM for tests: anvil, our own contracts on it, and the few calls a test scenario needs.

    @pytest.fixture
    def chain(tmp_path: Path) -> Iterator[evm.Chain]:
        with evm.running(tmp_path) as chain:
            yield chain

Blocks come only on demand, 12 s of chain time apart: `send` and what stands on it mine one for their transaction,
`submit` waits for `mine`. `finalized` is head - 8 and `safe` head - 4 (never below 0). The chain always starts from
the same state and time, so a test makes the same hashes in every run. Where node, the compiler or anvil is missing
the test is skipped, with the reason; with CI=true in the environment it fails. Calls block for milliseconds, so they
may be used inside async tests too.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from eth_abi.abi import encode
from eth_hash.auto import keccak

from vaultevents.core.logs import Log
from vaultevents.core.units import Address, Hash32

CONTRACTS = Path(__file__).resolve().parent.parent / "contracts"
GENESIS_S, SECONDS_PER_BLOCK = 1_760_000_000, 12
SLOTS_IN_AN_EPOCH = 4
FINALIZED_DEPTH = 2 * SLOTS_IN_AN_EPOCH

_OPTIONS = ("--port", "0", "--no-mining", "--order", "fifo", "--timestamp", str(GENESIS_S))
BUNDLED_ANVIL = CONTRACTS / "node_modules" / "@foundry-rs" / "anvil-linux-amd64" / "bin" / "anvil"
_LISTENING = re.compile(r"^Listening on 127\.0\.0\.1:(\d+)$", re.MULTILINE)
_START_LIMIT_S = 20.0

FUND = keccak(b"fund()")[:4]


class RpcError(AssertionError):
    """The node answered a call with an error; `error` is its object."""

    def __init__(self, method: str, error: dict[str, Any]) -> None:
        super().__init__(f"{method}: {error}")
        self.error = error


@dataclass(frozen=True, slots=True)
class Inner:
    """One call inside `Chain.multicall`."""

    target: bytes
    value_wei: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Chain:
    """One running anvil. `accounts` are unlocked and rich; addresses are 20 bytes, amounts wei, hashes hex text."""

    port: int
    accounts: tuple[bytes, ...]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rpc(self, method: str, *params: Any) -> Any:
        """The result of one JSON-RPC call; `RpcError` for an error object."""
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", "/", body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if "error" in answer:
            raise RpcError(method, answer["error"])
        return answer["result"]

    def block(self, tag: int | str = "latest") -> dict[str, Any]:
        """The header and transaction hashes of a block, by number or tag."""
        block: dict[str, Any] = self.rpc("eth_getBlockByNumber", hex(tag) if isinstance(tag, int) else tag, False)
        return block

    def number(self, tag: str = "latest") -> int:
        return int(self.block(tag)["number"], 16)

    def logs(self, first: int = 0, last: int | None = None, topics: Sequence[bytes] = ()) -> list[dict[str, Any]]:
        """The raw logs of the blocks `first`..`last` (the head when None) with one of `topics` as topic0 (any)."""
        span = {"fromBlock": hex(first), "toBlock": "latest" if last is None else hex(last)}
        logs: list[dict[str, Any]] = self.rpc(
            "eth_getLogs", span | ({"topics": [["0x" + topic.hex() for topic in topics]]} if topics else {})
        )
        return logs

    def balance_wei(self, address: bytes) -> int:
        return int(self.rpc("eth_getBalance", "0x" + address.hex(), "latest"), 16)

    def mine(self, blocks: int = 1) -> None:
        """Adds blocks; what was submitted goes into the first one, in the order of its coming."""
        self.rpc("anvil_mine", hex(blocks), hex(SECONDS_PER_BLOCK))

    def finalize(self) -> None:
        """Makes everything that is on the chain now final."""
        self.mine(FINALIZED_DEPTH)

    def submit(
        self,
        to: bytes | None,
        data: bytes = b"",
        value_wei: int = 0,
        sender: bytes | None = None,
        gas: int = 3_000_000,
    ) -> str:
        """Puts a transaction into the pool and gives its hash; the fixed gas limit lets a reverting one pass."""
        transaction = {
            "from": "0x" + (sender or self.accounts[0]).hex(),
            "value": hex(value_wei),
            "gas": hex(gas),
        }
        transaction |= {"input": "0x" + data.hex()} | ({} if to is None else {"to": "0x" + to.hex()})
        tx_hash: str = self.rpc("eth_sendTransaction", transaction)
        return tx_hash

    def receipt(self, tx_hash: str) -> dict[str, Any]:
        receipt: dict[str, Any] | None = self.rpc("eth_getTransactionReceipt", tx_hash)
        assert receipt is not None, f"{tx_hash} is not on the chain"
        return receipt

    def send(
        self,
        to: bytes | None,
        data: bytes = b"",
        value_wei: int = 0,
        sender: bytes | None = None,
        reverts: bool = False,
    ) -> dict[str, Any]:
        """Mines a transaction, checks that it went well (or reverted, if so expected), gives its receipt."""
        tx_hash = self.submit(to, data, value_wei, sender)
        self.mine()
        receipt = self.receipt(tx_hash)
        assert receipt["status"] == ("0x0" if reverts else "0x1"), receipt
        return receipt

    def deploy(self, contract: str, *arguments: Any) -> bytes:
        """A new contract of contracts/*.sol, with the arguments of its constructor; gives its address."""
        made = compiled()[contract]
        constructor: dict[str, Any] = next((entry for entry in made["abi"] if entry["type"] == "constructor"), {})
        types = [parameter["type"] for parameter in constructor.get("inputs", [])]
        receipt = self.send(None, bytes.fromhex(made["bytecode"][2:]) + encode(types, arguments))
        return bytes.fromhex(receipt["contractAddress"][2:])

    def fund(self, vault: bytes, amount_wei: int, sender: bytes | None = None) -> dict[str, Any]:
        return self.send(vault, FUND, amount_wei, sender)

    def multicall(self, multicall: bytes, calls: Sequence[Inner], tolerant: bool = False) -> dict[str, Any]:
        """All calls in one transaction; a tolerant one survives inner reverts."""
        return self.send(multicall, multicall_data(calls, tolerant), sum(call.value_wei for call in calls))

    def request_withdrawal(self, queue: bytes, owner: bytes, amount_wei: int) -> int:
        """A request that can be claimed at once; gives its id."""
        self.send(queue, call_data("request(address)", owner), amount_wei)
        last = self.rpc("eth_call", {"to": "0x" + queue.hex(), "data": "0x" + call_data("lastRequestId()").hex()})
        return int(last, 16)

    def claim(self, queue: bytes, owner: bytes, recipient: bytes, *request_ids: int) -> dict[str, Any]:
        """Claims by the owner of the requests: one id alone, several as a batch in one transaction."""
        if len(request_ids) == 1:
            data = call_data("claimWithdrawal(address,uint256)", recipient, *request_ids)
        else:
            hints = [1] * len(request_ids)
            data = call_data("claimWithdrawalBatch(address,uint256[],uint256[])", recipient, request_ids, hints)
        return self.send(queue, data, sender=owner)


def as_log(raw: dict[str, Any]) -> Log:
    """A raw log as the service has it."""
    assert raw["removed"] is False
    return Log(
        address=Address(_unhex(raw["address"])),
        topics=tuple(Hash32(_unhex(topic)) for topic in raw["topics"]),
        data=_unhex(raw["data"]),
        block_number=int(raw["blockNumber"], 16),
        block_hash=Hash32(_unhex(raw["blockHash"])),
        tx_hash=Hash32(_unhex(raw["transactionHash"])),
        log_index=int(raw["logIndex"], 16),
        timestamp_s=int(raw["blockTimestamp"], 16),
    )


def _unhex(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("0x"))


def call_data(signature: str, *arguments: Any) -> bytes:
    """Selector and ABI encoding, for example of `claimWithdrawal(address,uint256)`."""
    inside = signature[signature.index("(") + 1 : -1]
    types = re.findall(r"(?:\([^)]*\)|[^,(])+", inside)
    return keccak(signature.encode())[:4] + encode(types, arguments)


def multicall_data(calls: Sequence[Inner], tolerant: bool = False) -> bytes:
    inner = [(call.target, call.value_wei, call.data) for call in calls]
    return call_data("run(bool,(address,uint256,bytes)[])", tolerant, inner)


@cache
def compiled() -> dict[str, dict[str, Any]]:
    """`{contract: {abi, bytecode}}` of contracts/*.sol, compiled once and kept for all processes until they change."""
    node = shutil.which("node")
    if node is None or not (CONTRACTS / "node_modules" / "solc").is_dir():
        absent("node, or the compiler of contracts/package-lock.json, is not installed")
    sources = [*sorted(CONTRACTS.glob("*.sol")), CONTRACTS / "compile.js", CONTRACTS / "package-lock.json"]
    digest = hashlib.sha256(b"".join(hashlib.sha256(source.read_bytes()).digest() for source in sources)).hexdigest()
    kept = CONTRACTS / "node_modules" / ".cache" / f"contracts-{digest}.json"
    kept.parent.mkdir(exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            done = subprocess.run([node, "compile.js"], cwd=CONTRACTS, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            new = kept.with_suffix(".new")
            new.write_text(done.stdout)
            new.replace(kept)
    contracts: dict[str, dict[str, Any]] = json.loads(kept.read_text())
    return contracts


def anvil_path() -> str:
    """The anvil of contracts/node_modules, else the one on PATH."""
    found = str(BUNDLED_ANVIL) if BUNDLED_ANVIL.exists() else shutil.which("anvil")
    return found or absent("anvil is neither in contracts/node_modules nor on PATH")


def absent(what: str) -> NoReturn:
    """Skips the test for want of something from npm, with the reason; with CI=true in the environment it fails."""
    advice = f"{what}: run 'npm ci --ignore-scripts' in contracts/"
    if os.environ.get("CI") == "true":
        pytest.fail(advice)
    pytest.skip(advice)


@contextmanager
def running(directory: Path, *options: str) -> Iterator[Chain]:
    """A fresh anvil on a free port of loopback, its output in `directory`, stopped at the end."""
    compiled()
    output = directory / "anvil.log"
    command = [anvil_path(), *_OPTIONS, "--slots-in-an-epoch", str(SLOTS_IN_AN_EPOCH), *options]
    with output.open("wb") as stdout:
        process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        port = _port(process, output)
        accounts = Chain(port, ()).rpc("eth_accounts")
        Chain(port, ()).rpc("anvil_setBlockTimestampInterval", SECONDS_PER_BLOCK)
        yield Chain(port, tuple(bytes.fromhex(account[2:]) for account in accounts))
    finally:
        process.kill()
        process.wait()


def _port(process: subprocess.Popen[bytes], output: Path) -> int:
    limit = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < limit and process.poll() is None:
        if said := _LISTENING.search(output.read_text(errors="replace")):
            return int(said[1])
        time.sleep(0.01)
    pytest.fail(f"anvil did not start: {output.read_text(errors='replace')[-2000:]}")
