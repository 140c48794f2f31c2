// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// A stand-in for a staking vault: it speaks only where the real one does.
contract StakingVault {
    event EtherFunded(uint256 amount);

    error NothingSent();

    /// Empty like the real one: a plain transfer raises the balance and leaves no log.
    receive() external payable {}

    function fund() external payable {
        if (msg.value == 0) revert NothingSent();
        emit EtherFunded(msg.value);
    }
}
