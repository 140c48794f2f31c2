// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// A stand-in for the contract that takes the oracle's reports: anybody may publish, and of a vault's values it keeps
/// only the time of the last report applied. It checks data and proof as the real one does, in the same order.
contract LazyOracle {
    event VaultsReportDataUpdated(
        uint256 indexed timestamp, uint256 indexed refSlot, bytes32 indexed root, string cid
    );

    error InvalidProof();
    error VaultReportIsFreshEnough();

    uint256 public latestReportTimestamp;
    uint256 private refSlot;
    bytes32 private treeRoot;
    string private reportCid;

    /// The timestamp of the last report applied to a vault, 0 before the first.
    mapping(address => uint256) public appliedTimestamp;

    function latestReportData() external view returns (uint256, uint256, bytes32, string memory) {
        return (latestReportTimestamp, refSlot, treeRoot, reportCid);
    }

    /// Overwrites whatever was published before, also under the same timestamp.
    function updateReportData(uint256 timestamp, uint256 slot, bytes32 root, string calldata cid) external {
        (latestReportTimestamp, refSlot, treeRoot, reportCid) = (timestamp, slot, root, cid);
        emit VaultsReportDataUpdated(timestamp, slot, root, cid);
    }

    function updateVaultData(
        address vault,
        uint256 totalValue,
        uint256 cumulativeLidoFees,
        uint256 liabilityShares,
        uint256 maxLiabilityShares,
        uint256 slashingReserve,
        bytes32[] calldata proof
    ) external {
        bytes32 inner = keccak256(
            abi.encode(vault, totalValue, cumulativeLidoFees, liabilityShares, maxLiabilityShares, slashingReserve)
        );
        bytes32 node = keccak256(bytes.concat(inner));
        for (uint256 i = 0; i < proof.length; ++i) node = _parent(node, proof[i]);
        if (node != treeRoot) revert InvalidProof();
        if (latestReportTimestamp <= appliedTimestamp[vault]) revert VaultReportIsFreshEnough();
        appliedTimestamp[vault] = latestReportTimestamp;
    }

    /// Sorted, so a proof needs no sides.
    function _parent(bytes32 one, bytes32 other) private pure returns (bytes32) {
        return one < other ? keccak256(bytes.concat(one, other)) : keccak256(bytes.concat(other, one));
    }
}
