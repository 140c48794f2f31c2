// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// A stand-in for a pool of the vaults-wrapper: it belongs to a vault and has a withdrawal queue.
contract StvPool {
    address public immutable VAULT;
    address public immutable WITHDRAWAL_QUEUE;
    address public immutable DASHBOARD;

    constructor(address vault, address queue, address dashboard) {
        (VAULT, WITHDRAWAL_QUEUE, DASHBOARD) = (vault, queue, dashboard);
    }
}
