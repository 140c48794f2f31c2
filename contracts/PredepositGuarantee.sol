// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {StakingVault} from "./StakingVault.sol";

/// A stand-in for the guarantee of deposits: it emits a validator's steps, without any check.
contract PredepositGuarantee {
    event ValidatorPreDeposited(
        bytes indexed validatorPubkey,
        address indexed nodeOperator,
        address indexed stakingVault,
        bytes32 withdrawalCredentials
    );
    event ValidatorProven(
        bytes indexed validatorPubkey,
        address indexed nodeOperator,
        address indexed stakingVault,
        bytes32 withdrawalCredentials
    );
    event ValidatorActivated(
        bytes indexed validatorPubkey,
        address indexed nodeOperator,
        address indexed stakingVault,
        bytes32 withdrawalCredentials
    );
    event ValidatorCompensated(
        address indexed stakingVault,
        address indexed nodeOperator,
        bytes indexed validatorPubkey,
        uint256 guaranteeTotal,
        uint256 guaranteeLocked
    );

    function activate(StakingVault vault, bytes calldata pubkey) external {
        bytes32 credentials = vault.withdrawalCredentials();
        emit ValidatorPreDeposited(pubkey, vault.nodeOperator(), address(vault), credentials);
        emit ValidatorProven(pubkey, vault.nodeOperator(), address(vault), credentials);
        emit ValidatorActivated(pubkey, vault.nodeOperator(), address(vault), credentials);
    }

    function compensate(StakingVault vault, bytes calldata pubkey) external {
        emit ValidatorCompensated(address(vault), vault.nodeOperator(), pubkey, 1 ether, 0);
    }
}
