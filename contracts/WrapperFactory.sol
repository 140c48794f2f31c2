// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {Dashboard} from "./Dashboard.sol";
import {OssifiableProxy} from "./OssifiableProxy.sol";
import {StakingVault} from "./StakingVault.sol";
import {StvPool} from "./StvPool.sol";
import {VaultFactory} from "./VaultFactory.sol";
import {WithdrawalQueue} from "./WithdrawalQueue.sol";

/// A stand-in for the factory of the vaults-wrapper: a pool with its vault and its upgradeable queue, in one
/// transaction where the real one takes two.
contract WrapperFactory {
    struct VaultConfig {
        address nodeOperator;
        address nodeOperatorManager;
        uint256 nodeOperatorFeeBP;
        uint256 confirmExpiry;
    }

    struct CommonPoolConfig {
        uint256 minWithdrawalDelayTime;
        string name;
        string symbol;
        address emergencyCommittee;
    }

    struct AuxiliaryPoolConfig {
        bool allowListEnabled;
        address allowListManager;
        bool mintingEnabled;
        uint256 reserveRatioGapBP;
    }

    struct TimelockConfig {
        uint256 minDelaySeconds;
        address proposer;
        address executor;
    }

    struct PoolIntermediate {
        address dashboard;
        address poolProxy;
        address poolImpl;
        address withdrawalQueueProxy;
        address wqImpl;
        address timelock;
    }

    event PoolCreationStarted(
        address indexed sender,
        VaultConfig vaultConfig,
        CommonPoolConfig commonPoolConfig,
        AuxiliaryPoolConfig auxiliaryConfig,
        TimelockConfig timelockConfig,
        address indexed strategyFactory,
        bytes strategyDeployBytes,
        PoolIntermediate intermediate,
        uint256 finishDeadline
    );
    event PoolCreated(
        address vault,
        address pool,
        bytes32 indexed poolType,
        address withdrawalQueue,
        address indexed strategyFactory,
        bytes strategyDeployBytes,
        address strategy
    );

    VaultFactory public immutable VAULT_FACTORY;
    address private immutable QUEUE_IMPLEMENTATION;

    constructor(VaultFactory vaultFactory, address queue) {
        (VAULT_FACTORY, QUEUE_IMPLEMENTATION) = (vaultFactory, queue);
    }

    /// The sender is the admin of the vault and of the queue's proxy; the value is the first funding of the vault.
    function createPool(address nodeOperator) external payable returns (address) {
        (StakingVault vault, Dashboard dashboard) =
            VAULT_FACTORY.createVaultWithDashboard{value: msg.value}(msg.sender, nodeOperator);
        address queue = address(new OssifiableProxy(QUEUE_IMPLEMENTATION, msg.sender));
        address pool = address(new StvPool(address(vault), queue, address(dashboard)));
        WithdrawalQueue(queue).initialize(pool, address(vault), address(dashboard), msg.sender);
        _start(nodeOperator, PoolIntermediate(address(dashboard), pool, pool, queue, QUEUE_IMPLEMENTATION, msg.sender));
        emit PoolCreated(address(vault), pool, keccak256("StvPool"), queue, address(0), "", address(0));
        return pool;
    }

    function _start(address nodeOperator, PoolIntermediate memory made) private {
        emit PoolCreationStarted(
            msg.sender,
            VaultConfig(nodeOperator, nodeOperator, 100, 1 days),
            CommonPoolConfig(1 hours, "Pool", "STV", msg.sender),
            AuxiliaryPoolConfig(false, address(0), false, 0),
            TimelockConfig(1 hours, msg.sender, msg.sender),
            address(0),
            "",
            made,
            block.timestamp + 1 days
        );
    }
}
