// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {UpgradeableBeacon} from "./UpgradeableBeacon.sol";

/// A vault as the factory makes it: it runs the code that the beacon names.
contract BeaconProxy {
    event BeaconUpgraded(address indexed beacon);

    UpgradeableBeacon private immutable BEACON;

    constructor(UpgradeableBeacon beacon) {
        BEACON = beacon;
        emit BeaconUpgraded(address(beacon));
    }

    receive() external payable {
        _delegate();
    }

    fallback() external payable {
        _delegate();
    }

    function _delegate() private {
        address implementation = BEACON.implementation();
        assembly {
            calldatacopy(0, 0, calldatasize())
            let done := delegatecall(gas(), implementation, 0, calldatasize(), 0, 0)
            returndatacopy(0, 0, returndatasize())
            switch done
            case 0 { revert(0, returndatasize()) }
            default { return(0, returndatasize()) }
        }
    }
}
