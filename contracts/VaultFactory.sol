// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {BeaconProxy} from "./BeaconProxy.sol";
import {Dashboard} from "./Dashboard.sol";
import {LidoLocator} from "./LidoLocator.sol";
import {StakingVault} from "./StakingVault.sol";
import {UpgradeableBeacon} from "./UpgradeableBeacon.sol";

/// A stand-in for the factory of the vaults: its logs come in the order of the real one's.
contract VaultFactory {
    event VaultCreated(address indexed vault);
    event DashboardCreated(address indexed dashboard, address indexed vault, address indexed admin);

    error ZeroArgument(string argument);
    error InsufficientFunds();

    LidoLocator public immutable LIDO_LOCATOR;
    UpgradeableBeacon public immutable BEACON;
    address private immutable DASHBOARD_IMPLEMENTATION;
    VaultFactory public immutable PREVIOUS_FACTORY;

    mapping(address => bool) private deployed;

    constructor(LidoLocator locator, UpgradeableBeacon beacon, address dashboard, VaultFactory previous) {
        if (address(locator) == address(0)) revert ZeroArgument("_lidoLocator");
        (LIDO_LOCATOR, BEACON) = (locator, beacon);
        (DASHBOARD_IMPLEMENTATION, PREVIOUS_FACTORY) = (dashboard, previous);
    }

    function deployedVaults(address _vault) external view returns (bool) {
        return deployed[_vault]
            || (address(PREVIOUS_FACTORY) != address(0) && PREVIOUS_FACTORY.deployedVaults(_vault));
    }

    /// A vault that is connected at once; the value is its first funding.
    function createVaultWithDashboard(address admin, address nodeOperator)
        public
        payable
        returns (StakingVault vault, Dashboard dashboard)
    {
        return _create(admin, nodeOperator, msg.value, true);
    }

    function createVaultWithDashboardWithoutConnectingToVaultHub(address admin, address nodeOperator)
        external
        returns (StakingVault vault, Dashboard dashboard)
    {
        return _create(admin, nodeOperator, 0, false);
    }

    /// `count` connected vaults in one transaction; each takes its part of the value.
    function createMany(uint256 count, address admin, address nodeOperator) external payable {
        for (uint256 i = 0; i < count; ++i) _create(admin, nodeOperator, msg.value / count, true);
    }

    function _create(address admin, address nodeOperator, uint256 value, bool connected)
        private
        returns (StakingVault vault, Dashboard dashboard)
    {
        if (connected && value == 0) revert InsufficientFunds();
        vault = StakingVault(payable(address(new BeaconProxy(BEACON))));
        deployed[address(vault)] = true;
        dashboard = Dashboard(payable(_clone(DASHBOARD_IMPLEMENTATION)));
        dashboard.initialize(vault);
        vault.initialize(address(dashboard), nodeOperator, LIDO_LOCATOR.predepositGuarantee());
        if (connected) dashboard.connectToVaultHub{value: value}();
        emit VaultCreated(address(vault));
        emit DashboardCreated(address(dashboard), address(vault), admin);
    }

    /// A minimal proxy (ERC-1167).
    function _clone(address implementation) private returns (address clone) {
        bytes memory code = abi.encodePacked(
            hex"3d602d80600a3d3981f3363d3d373d3d3d363d73", implementation, hex"5af43d82803e903d91602b57fd5bf3"
        );
        assembly {
            clone := create(0, add(code, 0x20), mload(code))
        }
        require(clone != address(0));
    }
}
