// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {LidoLocator} from "./LidoLocator.sol";
import {StakingVault} from "./StakingVault.sol";
import {VaultHub} from "./VaultHub.sol";

/// A stand-in for the contract that usually owns a vault. The factory clones one for each vault.
contract Dashboard {
    VaultHub public immutable VAULT_HUB;
    LidoLocator public immutable LIDO_LOCATOR;
    StakingVault public stakingVault;

    constructor(VaultHub hub, LidoLocator locator) {
        (VAULT_HUB, LIDO_LOCATOR) = (hub, locator);
    }

    /// A plain transfer funds the vault.
    receive() external payable {
        fund();
    }

    function initialize(StakingVault vault) external {
        require(address(stakingVault) == address(0));
        stakingVault = vault;
    }

    function connectToVaultHub() external payable {
        stakingVault.fund{value: msg.value}();
        stakingVault.transferOwnership(address(VAULT_HUB));
        VAULT_HUB.connectVault(address(stakingVault));
    }

    function fund() public payable {
        if (VAULT_HUB.isVaultConnected(address(stakingVault))) {
            VAULT_HUB.fund{value: msg.value}(address(stakingVault));
        } else {
            stakingVault.fund{value: msg.value}();
        }
    }

    function voluntaryDisconnect() external {
        VAULT_HUB.voluntaryDisconnect(address(stakingVault));
    }

    function transferVaultOwnership(address newOwner) external {
        VAULT_HUB.transferVaultOwnership(address(stakingVault), newOwner);
    }
}
