// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {LidoLocator} from "./LidoLocator.sol";
import {StakingVault} from "./StakingVault.sol";
import {VaultHub} from "./VaultHub.sol";

/// A stand-in for the contract that takes the oracle's reports: anybody may publish, and of a vault's values it keeps
/// only the time of the last report applied. It checks data and proof as the real one does, in the same order. With a
/// locator it hands them to the hub, too.
contract LazyOracle {
    struct QuarantineInfo {
        bool isActive;
        uint256 pendingTotalValueIncrease;
        uint256 startTimestamp;
        uint256 endTimestamp;
        uint256 totalValueRemainder;
    }

    struct VaultInfo {
        address vault;
        uint256 aggregatedBalance;
        int256 inOutDelta;
        bytes32 withdrawalCredentials;
        uint256 liabilityShares;
        uint256 maxLiabilityShares;
        uint256 mintableStETH;
        uint96 shareLimit;
        uint16 reserveRatioBP;
        uint16 forcedRebalanceThresholdBP;
        uint16 infraFeeBP;
        uint16 liquidityFeeBP;
        uint16 reservationFeeBP;
        bool pendingDisconnect;
    }

    event VaultsReportDataUpdated(
        uint256 indexed timestamp, uint256 indexed refSlot, bytes32 indexed root, string cid
    );
    event QuarantineActivated(address indexed vault, uint256 delta);
    event QuarantineReleased(address indexed vault, uint256 delta);
    event QuarantineRemoved(address indexed vault);
    event QuarantineUpdated(uint256 totalValueReminder);
    event SanityParamsUpdated(uint256 quarantinePeriod, uint256 maxRewardRatioBP, uint256 maxLidoFeeRatePerSecond);

    error InvalidProof();
    error VaultReportIsFreshEnough();
    error UnderflowInTotalValueCalculation();
    error TotalValueTooLarge();
    error CumulativeLidoFeesTooLow(uint256 reportingFees, uint256 previousFees);
    error CumulativeLidoFeesTooLarge(uint256 feeIncrease, uint256 maxFeeIncrease);
    error InvalidMaxLiabilityShares();
    error NotAuthorized();

    LidoLocator private locator;
    uint256 public latestReportTimestamp;
    uint256 private latestRefSlot;
    bytes32 private latestRoot;
    string private latestCid;

    /// The timestamp of the last report applied to a vault, 0 before the first.
    mapping(address => uint256) public appliedTimestamp;

    function setLocator(LidoLocator locator_) external {
        locator = locator_;
    }

    function latestReportData()
        external
        view
        returns (uint256 timestamp, uint256 refSlot, bytes32 treeRoot, string memory reportCid)
    {
        return (latestReportTimestamp, latestRefSlot, latestRoot, latestCid);
    }

    function vaultsCount() external view returns (uint256) {
        return _hub().vaultsCount();
    }

    function vaultInfo(address _vault) public view returns (VaultInfo memory) {
        VaultInfo memory info;
        VaultHub.VaultConnection memory connection = _hub().vaultConnection(_vault);
        info.vault = _vault;
        info.aggregatedBalance = _vault.balance;
        info.withdrawalCredentials = StakingVault(payable(_vault)).withdrawalCredentials();
        info.shareLimit = connection.shareLimit;
        info.reserveRatioBP = connection.reserveRatioBP;
        info.forcedRebalanceThresholdBP = connection.forcedRebalanceThresholdBP;
        info.infraFeeBP = connection.infraFeeBP;
        info.liquidityFeeBP = connection.liquidityFeeBP;
        info.reservationFeeBP = connection.reservationFeeBP;
        info.pendingDisconnect = _hub().isPendingDisconnect(_vault);
        return info;
    }

    function batchVaultsInfo(uint256 _offset, uint256 _limit) external view returns (VaultInfo[] memory) {
        uint256 count = _hub().vaultsCount();
        uint256 size = _offset >= count ? 0 : (_offset + _limit > count ? count - _offset : _limit);
        VaultInfo[] memory batch = new VaultInfo[](size);
        for (uint256 i = 0; i < size; ++i) batch[i] = vaultInfo(_hub().vaultByIndex(_offset + i + 1));
        return batch;
    }

    /// Nothing is ever held back here.
    function vaultQuarantine(address _vault) external view returns (QuarantineInfo memory) {}

    /// Overwrites whatever was published before, also under the same timestamp.
    function updateReportData(
        uint256 _vaultsDataTimestamp,
        uint256 _vaultsDataRefSlot,
        bytes32 _vaultsDataTreeRoot,
        string calldata _vaultsDataReportCid
    ) external {
        (latestReportTimestamp, latestRefSlot) = (_vaultsDataTimestamp, _vaultsDataRefSlot);
        (latestRoot, latestCid) = (_vaultsDataTreeRoot, _vaultsDataReportCid);
        emit VaultsReportDataUpdated(
            _vaultsDataTimestamp, _vaultsDataRefSlot, _vaultsDataTreeRoot, _vaultsDataReportCid
        );
    }

    function updateVaultData(
        address _vault,
        uint256 _totalValue,
        uint256 _cumulativeLidoFees,
        uint256 _liabilityShares,
        uint256 _maxLiabilityShares,
        uint256 _slashingReserve,
        bytes32[] calldata _proof
    ) external {
        bytes32 inner = keccak256(
            abi.encode(
                _vault, _totalValue, _cumulativeLidoFees, _liabilityShares, _maxLiabilityShares, _slashingReserve
            )
        );
        bytes32 node = keccak256(bytes.concat(inner));
        for (uint256 i = 0; i < _proof.length; ++i) node = _parent(node, _proof[i]);
        if (node != latestRoot) revert InvalidProof();
        if (latestReportTimestamp <= appliedTimestamp[_vault]) revert VaultReportIsFreshEnough();
        appliedTimestamp[_vault] = latestReportTimestamp;
        if (address(locator) == address(0)) return;
        _hub().applyVaultReport(
            _vault,
            latestReportTimestamp,
            _totalValue,
            _cumulativeLidoFees,
            _liabilityShares,
            _maxLiabilityShares,
            _slashingReserve
        );
    }

    function _hub() private view returns (VaultHub) {
        return VaultHub(locator.vaultHub());
    }

    /// Sorted, so a proof needs no sides.
    function _parent(bytes32 one, bytes32 other) private pure returns (bytes32) {
        return one < other ? keccak256(bytes.concat(one, other)) : keccak256(bytes.concat(other, one));
    }
}
