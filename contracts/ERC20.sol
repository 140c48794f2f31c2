// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// A stand-in for a token, as far as one is recognised.
contract ERC20 {
    string public symbol;

    constructor(string memory symbol_) {
        symbol = symbol_;
    }
}
