// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// A withdrawal queue after an upgrade by its owner: the event has the signature of the known one, and so its first
/// topic, but no indexed argument.
contract UnindexedWithdrawalQueue {
    event WithdrawalClaimed(uint256 requestId, address owner, address recipient, uint256 amountOfETH);

    function claim(uint256 requestId, address recipient, uint256 amount) external {
        emit WithdrawalClaimed(requestId, msg.sender, recipient, amount);
    }
}
