// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// Several calls in one: with ether, as a Safe batch makes them, or only to read, as Multicall3 does.
contract Multicall {
    struct Call {
        address target;
        uint256 value;
        bytes data;
    }

    struct Call3 {
        address target;
        bool allowFailure;
        bytes callData;
    }

    struct Result {
        bool success;
        bytes returnData;
    }

    /// Without `tolerant` a failing call reverts the transaction; with it only that call's own logs are lost.
    function run(bool tolerant, Call[] calldata calls) external payable {
        for (uint256 i = 0; i < calls.length; ++i) {
            (bool done, bytes memory reason) = calls[i].target.call{value: calls[i].value}(calls[i].data);
            if (!done && !tolerant) _revert(reason);
        }
    }

    function aggregate3(Call3[] calldata calls) external payable returns (Result[] memory returnData) {
        returnData = new Result[](calls.length);
        for (uint256 i = 0; i < calls.length; ++i) {
            (bool done, bytes memory answer) = calls[i].target.call(calls[i].callData);
            if (!done && !calls[i].allowFailure) _revert(answer);
            returnData[i] = Result(done, answer);
        }
    }

    function _revert(bytes memory reason) private pure {
        assembly {
            revert(add(reason, 0x20), mload(reason))
        }
    }
}
