// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// A stand-in for the withdrawal queue of a vault's wrapper. A request is claimable at once; what it pays is the
/// ether sent with it, 0 included: a request that was rebalanced away is claimed for nothing.
contract WithdrawalQueue {
    event WithdrawalClaimed(
        uint256 indexed requestId, address indexed owner, address indexed recipient, uint256 amountOfETH
    );

    error NotOwner(uint256 requestId);
    error AlreadyClaimed(uint256 requestId);
    error PaymentRefused(address recipient);

    struct Request {
        address owner;
        bool claimed;
        uint256 amount;
    }

    mapping(uint256 => Request) public requests;
    uint256 public lastRequestId;

    /// Ids count from 1.
    function request(address owner) external payable returns (uint256 requestId) {
        requestId = ++lastRequestId;
        requests[requestId] = Request(owner, false, msg.value);
    }

    function claimWithdrawal(address recipient, uint256 requestId) external {
        _claim(recipient, requestId);
    }

    /// One log for each id, all with the same recipient.
    function claimWithdrawalBatch(address recipient, uint256[] calldata requestIds) external {
        for (uint256 i = 0; i < requestIds.length; ++i) _claim(recipient, requestIds[i]);
    }

    function _claim(address recipient, uint256 requestId) private {
        Request storage found = requests[requestId];
        if (found.owner != msg.sender) revert NotOwner(requestId);
        if (found.claimed) revert AlreadyClaimed(requestId);
        found.claimed = true;
        (bool paid,) = recipient.call{value: found.amount}("");
        if (!paid) revert PaymentRefused(recipient);
        emit WithdrawalClaimed(requestId, found.owner, recipient, found.amount);
    }
}
