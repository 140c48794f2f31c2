// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// A stand-in for a staking vault: it emits where the real one does. Without `initialize` it has no owner, and anybody
/// may fund it.
contract StakingVault {
    event EtherFunded(uint256 amount);
    event EtherWithdrawn(address indexed recipient, uint256 amount);
    event OwnershipTransferStarted(address indexed previousOwner, address indexed newOwner);
    event OwnershipTransferred(address indexed previousOwner, address indexed newOwner);
    event Initialized(uint64 version);
    event NodeOperatorSet(address indexed nodeOperator);
    event DepositorSet(address indexed previousDepositor, address indexed newDepositor);
    event BeaconChainDepositsPaused();
    event BeaconChainDepositsResumed();
    event ValidatorExitRequested(bytes indexed pubkey, bytes pubkeyRaw);
    event ValidatorWithdrawalsTriggered(
        bytes pubkeys, uint64[] amountsInGwei, uint256 excess, address indexed refundRecipient
    );
    event ValidatorEjectionsTriggered(bytes pubkeys, uint256 excess, address indexed refundRecipient);
    event EtherStaged(uint256 amount);
    event EtherUnstaged(uint256 amount);
    event PinnedImplementationUpdated(address indexed implementation);

    error ZeroArgument(string name);
    error OwnableUnauthorizedAccount(address account);

    address public owner;
    address public pendingOwner;
    address public nodeOperator;
    address public depositor;

    /// Empty like the real one: a plain transfer raises the balance and leaves no log.
    receive() external payable {}

    modifier onlyOwner() {
        if (owner != address(0) && msg.sender != owner) revert OwnableUnauthorizedAccount(msg.sender);
        _;
    }

    function initialize(address owner_, address nodeOperator_, address depositor_) external onlyOwner {
        (owner, nodeOperator, depositor) = (owner_, nodeOperator_, depositor_);
        emit OwnershipTransferred(address(0), owner_);
        emit NodeOperatorSet(nodeOperator_);
        emit DepositorSet(address(0), depositor_);
        emit Initialized(1);
    }

    function fund() external payable onlyOwner {
        if (msg.value == 0) revert ZeroArgument("msg.value");
        emit EtherFunded(msg.value);
    }

    function withdraw(address recipient, uint256 amount) external onlyOwner {
        (bool paid,) = recipient.call{value: amount}("");
        require(paid);
        emit EtherWithdrawn(recipient, amount);
    }

    function transferOwnership(address newOwner) external onlyOwner {
        pendingOwner = newOwner;
        emit OwnershipTransferStarted(owner, newOwner);
    }

    function acceptOwnership() external {
        if (msg.sender != pendingOwner) revert OwnableUnauthorizedAccount(msg.sender);
        emit OwnershipTransferred(owner, msg.sender);
        (owner, pendingOwner) = (msg.sender, address(0));
    }

    function requestValidatorExit(bytes calldata pubkey) external onlyOwner {
        emit ValidatorExitRequested(pubkey, pubkey);
    }

    function withdrawalCredentials() external view returns (bytes32) {
        return bytes32((uint256(2) << 248) | uint160(address(this)));
    }
}
