"""Why `updateVaultData` would revert, in words (the custom errors of LazyOracle and VaultHub)."""

from __future__ import annotations

from vaultevents.core.keccak import keccak

MEANINGS = {
    "InvalidProof()": "wrong data, or a newer report has superseded this one",
    "VaultReportIsFreshEnough()": "somebody has applied this report already, or the vault was connected later",
    "NotConnectedToHub(address)": "the vault is not connected to the hub",
    "InOutDeltaCacheIsOverwritten()": "the vault moved ether in two later frames",
    "UnderflowInTotalValueCalculation()": "the total value would fall below zero",
    "TotalValueTooLarge()": "the total value is above 2^96 - 1",
    "CumulativeLidoFeesTooLow(uint256,uint256)": "the fees are lower than in the last applied report",
    "CumulativeLidoFeesTooLarge(uint256,uint256)": "the fees grew faster than is allowed",
    "InvalidMaxLiabilityShares()": "the maximum of liability shares is too low",
    "ResumedExpected()": "the hub is paused",
    "NotAuthorized()": "the caller is not allowed to",
}
_BY_SELECTOR = {keccak(signature.encode())[:4]: signature for signature in MEANINGS}


def revert_reason(data: bytes) -> str:
    """The name and meaning of a custom error by its selector; for an unknown one its first four bytes."""
    signature = _BY_SELECTOR.get(data[:4])
    if signature is None:
        return f"an unknown error 0x{data[:4].hex()}" if data else "no reason given"
    return f"{signature.split('(')[0]}: {MEANINGS[signature]}"
