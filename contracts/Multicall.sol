// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// Several calls with ether in one transaction, as a Safe batch makes them.
contract Multicall {
    struct Call {
        address target;
        uint256 value;
        bytes data;
    }

    /// Without `tolerant` a failing call reverts the transaction; with it only that call's own logs are lost.
    function run(bool tolerant, Call[] calldata calls) external payable {
        for (uint256 i = 0; i < calls.length; ++i) {
            (bool done, bytes memory reason) = calls[i].target.call{value: calls[i].value}(calls[i].data);
            if (done || tolerant) continue;
            assembly {
                revert(add(reason, 0x20), mload(reason))
            }
        }
    }
}
