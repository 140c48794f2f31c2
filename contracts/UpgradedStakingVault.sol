// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// A staking vault after an upgrade that changes its interface: the owner is a text, there is no depositor, and the
/// node operator is said to be at a URL (ERC-3668).
contract UpgradedStakingVault {
    event EtherFunded(uint256 amount);

    error FundingClosed(uint256 since);
    error OffchainLookup(address sender, string[] urls, bytes callData, bytes4 callbackFunction, bytes extraData);

    function owner() external pure returns (string memory) {
        return "a name, no longer an address";
    }

    function nodeOperator() external view returns (address) {
        string[] memory urls = new string[](1);
        urls[0] = "http://127.0.0.1:9/{sender}/{data}";
        revert OffchainLookup(address(this), urls, "", this.nodeOperator.selector, "");
    }

    function withdrawalCredentials() external view returns (bytes32) {
        return bytes32((uint256(2) << 248) | uint160(address(this)));
    }

    function fund() external payable {
        revert FundingClosed(block.number);
    }
}
