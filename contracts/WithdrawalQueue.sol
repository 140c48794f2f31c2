// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// A stand-in for the withdrawal queue of a vault's wrapper. A request is claimable at once; what it pays is the
/// ether sent with it, 0 included: a request that was rebalanced away is claimed for nothing.
contract WithdrawalQueue {
    event WithdrawalRequested(
        uint256 indexed requestId,
        address indexed owner,
        uint256 amountOfStv,
        uint256 amountOfStethShares,
        uint256 amountOfAssets
    );
    event WithdrawalsFinalized(
        uint256 indexed from,
        uint256 indexed to,
        uint256 ethLocked,
        uint256 ethForGasCoverage,
        uint256 stvBurned,
        uint256 stvRebalanced,
        uint256 stethSharesRebalanced,
        uint256 timestamp
    );
    event WithdrawalClaimed(
        uint256 indexed requestId, address indexed owner, address indexed recipient, uint256 amountOfETH
    );
    event Initialized(address indexed admin, address indexed finalizer);

    error NotOwner(address _requestor, address _owner);
    error RequestAlreadyClaimed(uint256 requestId);
    error CantSendValueRecipientMayHaveReverted();

    struct Request {
        address owner;
        bool claimed;
        uint256 amount;
    }

    address public POOL;
    address public VAULT;
    address public DASHBOARD;

    mapping(uint256 => Request) public requests;
    uint256 public lastRequestId;

    /// What the real one has in its code.
    function initialize(address pool, address vault, address dashboard, address admin) external {
        (POOL, VAULT, DASHBOARD) = (pool, vault, dashboard);
        emit Initialized(admin, admin);
    }

    /// Ids count from 1.
    function request(address owner) external payable returns (uint256 requestId) {
        requestId = ++lastRequestId;
        requests[requestId] = Request(owner, false, msg.value);
    }

    function claimWithdrawal(address _recipient, uint256 _requestId) external returns (uint256 claimedEth) {
        return _claim(_recipient, _requestId);
    }

    /// One log for each id, all with the same recipient. Hints are for the checkpoints of the real one.
    function claimWithdrawalBatch(address _recipient, uint256[] calldata _requestIds, uint256[] calldata _hints)
        external
        returns (uint256[] memory claimedAmounts)
    {
        require(_requestIds.length == _hints.length);
        claimedAmounts = new uint256[](_requestIds.length);
        for (uint256 i = 0; i < _requestIds.length; ++i) claimedAmounts[i] = _claim(_recipient, _requestIds[i]);
    }

    function _claim(address recipient, uint256 requestId) private returns (uint256) {
        Request storage found = requests[requestId];
        if (found.owner != msg.sender) revert NotOwner(msg.sender, found.owner);
        if (found.claimed) revert RequestAlreadyClaimed(requestId);
        found.claimed = true;
        (bool paid,) = recipient.call{value: found.amount}("");
        if (!paid) revert CantSendValueRecipientMayHaveReverted();
        emit WithdrawalClaimed(requestId, found.owner, recipient, found.amount);
        return found.amount;
    }
}
