"""Why `updateVaultData` would revert, in words (the custom errors of LazyOracle and VaultHub)."""

from __future__ import annotations

from collections.abc import Sequence

MEANINGS = {
    "InvalidProof": "wrong data, or a newer report has superseded this one",
    "VaultReportIsFreshEnough": "somebody has applied this report already, or the vault was connected later",
    "NotConnectedToHub": "the vault is not connected to the hub",
    "InOutDeltaCacheIsOverwritten": "the vault moved ether in two later frames",
    "UnderflowInTotalValueCalculation": "the total value would fall below zero",
    "TotalValueTooLarge": "the total value is above 2^96 - 1",
    "CumulativeLidoFeesTooLow": "the fees are lower than in the last applied report",
    "CumulativeLidoFeesTooLarge": "the fees grew faster than is allowed",
    "InvalidMaxLiabilityShares": "the maximum of liability shares is too low",
    "ResumedExpected": "the hub is paused",
    "NotAuthorized": "the caller is not allowed to",
}


def revert_reason(error: str | None, arguments: Sequence[object], data: bytes) -> str:
    """Return the name of an error with its meaning, or with its arguments; of an unknown one its first four bytes."""
    if error is None:
        return f"an unknown error 0x{data[:4].hex()}" if data else "no reason given"
    if error in MEANINGS:
        return f"{error}: {MEANINGS[error]}"
    return f"{error}({', '.join(map(repr, arguments))})"
