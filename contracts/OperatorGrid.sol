// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// A stand-in for the contract that sets the limits of vaults; anybody may change them.
contract OperatorGrid {
    event TierChanged(address indexed vault, uint256 indexed tierId, uint256 shareLimit);
    event VaultJailStatusUpdated(address indexed vault, bool isInJail);

    function changeTier(address vault, uint256 tierId, uint256 shareLimit) external {
        emit TierChanged(vault, tierId, shareLimit);
    }

    function setVaultJailStatus(address vault, bool isInJail) external {
        emit VaultJailStatusUpdated(vault, isInJail);
    }
}
