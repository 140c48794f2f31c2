"""The address of the oracle, asked of a LidoLocator on a real EVM, and calldata tried where it was published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import evm
from vaultevents import config
from vaultevents.chain.execution.client import ExecutionChain, HeadPolicy
from vaultevents.core.events import Observation, ReportUpdateAvailable
from vaultevents.core.reports import ReportLog
from vaultevents.core.units import Address, BlockNumber, Hash32, checksum
from vaultevents.store.reports import StoredReport
from vaultevents.watch.reports import _simulate
from vaultevents.wiring.sources import locator_problem

pytestmark = [pytest.mark.integration, pytest.mark.anvil]

LOCATOR, ORACLE, MOVED, NOBODY = (Address(bytes([n]) * 20) for n in (0x11, 0x22, 0x33, 0x44))


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[evm.Chain]:
    with evm.running(tmp_path) as chain:
        yield chain


def answers(chain: evm.Chain, contract: Address, address: Address) -> None:
    """Puts code at `contract` that gives `address` to every call: PUSH20, MSTORE, RETURN of one word."""
    chain.rpc("anvil_setCode", "0x" + contract.hex(), "0x73" + address.hex() + "5f5260205ff3")
    chain.finalize()


def settings(locator: Address) -> config.Settings:
    contracts = {"lido_locator": checksum(locator), "lazy_oracles": [checksum(ORACLE)]}
    return config.given({"network": "devnet", "chain_id": 1, "contracts": contracts}, "test")


async def test_a_locator_that_names_another_oracle_is_reported(chain: evm.Chain) -> None:
    async with ExecutionChain([chain.url], head=HeadPolicy()) as node:
        answers(chain, LOCATOR, ORACLE)
        assert await locator_problem(settings(LOCATOR), node) is None
        answers(chain, LOCATOR, MOVED)
        problem = await locator_problem(settings(LOCATOR), node)
        assert problem is not None and checksum(MOVED) in problem and "lazy_oracles" in problem
        problem = await locator_problem(settings(NOBODY), node)
        assert problem is not None and "not a LidoLocator" in problem


async def test_calldata_that_would_revert_is_reported_with_its_reason_and_nothing_more(chain: evm.Chain) -> None:
    oracle = Address(chain.deploy("LazyOracle"))
    chain.finalize()
    log = ReportLog(1, 1, Hash32(b"\x01" * 32), "Qm", BlockNumber(chain.number()), 0, Hash32(bytes(32)), 0, oracle)
    stored = StoredReport(1, log, "pending", None, 0, None, None)
    update = "updateVaultData(address,uint256,uint256,uint256,uint256,uint256,bytes32[])"
    calldata = evm.call_data(update, "0x" + NOBODY.hex(), 1, 2, 3, 4, 5, [])
    seen = [Observation(NOBODY, 1, 0, ReportUpdateAvailable(calldata, 1))]
    async with ExecutionChain([chain.url], head=HeadPolicy()) as node:
        with capture_logs() as logs:
            await _simulate(node, stored, seen)
    (reported,) = [line for line in logs if line["event"] == "calldata_reverts"]
    assert reported["vault"] == checksum(NOBODY)
    assert reported["reason"].startswith("InvalidProof")
