// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// Names the code of all vaults that the factory made; anybody may change it.
contract UpgradeableBeacon {
    event Upgraded(address indexed implementation);

    address public implementation;

    constructor(address implementation_) {
        upgradeTo(implementation_);
    }

    function upgradeTo(address implementation_) public {
        implementation = implementation_;
        emit Upgraded(implementation_);
    }
}
