"""Custom errors by selector; the selectors are those of the deployed contracts."""

from __future__ import annotations

import pytest
from eth_hash.auto import keccak

from vaultevents.core.reverts import MEANINGS, revert_reason

pytestmark = pytest.mark.unit

SELECTORS = {
    "InvalidProof()": "09bde339",
    "VaultReportIsFreshEnough()": "dfff39dc",
    "NotConnectedToHub(address)": "6787bb7d",
    "InOutDeltaCacheIsOverwritten()": "8d88f418",
    "UnderflowInTotalValueCalculation()": "e064e978",
    "TotalValueTooLarge()": "1f62eec2",
    "CumulativeLidoFeesTooLow(uint256,uint256)": "08b138cb",
    "CumulativeLidoFeesTooLarge(uint256,uint256)": "55512b35",
    "InvalidMaxLiabilityShares()": "8b3ecb07",
    "ResumedExpected()": "14378398",
    "NotAuthorized()": "ea8e4eb5",
}


@pytest.mark.parametrize("signature", MEANINGS)
def test_each_selector_is_that_of_the_contracts(signature: str) -> None:
    assert keccak(signature.encode())[:4].hex() == SELECTORS[signature]
    assert revert_reason(bytes.fromhex(SELECTORS[signature]) + bytes(64)).startswith(signature.split("(")[0])


def test_what_is_not_known_is_shown_as_it_is() -> None:
    assert revert_reason(bytes.fromhex("deadbeef00")) == "an unknown error 0xdeadbeef"
    assert revert_reason(b"") == "no reason given"
