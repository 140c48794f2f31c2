// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {LidoLocator} from "./LidoLocator.sol";
import {StakingVault} from "./StakingVault.sol";

/// A stand-in for the hub of the vaults: it owns connected vaults, keeps their list as the real one does (the last
/// vault takes the place of a removed one) and takes the reports that the oracle applies. Fees and obligations are set.
contract VaultHub {
    struct VaultConnection {
        address owner;
        uint96 shareLimit;
        uint96 vaultIndex;
        uint48 disconnectInitiatedTs;
        uint16 reserveRatioBP;
        uint16 forcedRebalanceThresholdBP;
        uint16 infraFeeBP;
        uint16 liquidityFeeBP;
        uint16 reservationFeeBP;
        bool beaconChainDepositsPauseIntent;
    }

    struct Report {
        uint104 totalValue;
        int104 inOutDelta;
        uint48 timestamp;
    }

    struct Obligations {
        uint256 sharesToBurn;
        uint256 feesToSettle;
    }

    event VaultConnected(
        address indexed vault,
        uint256 shareLimit,
        uint256 reserveRatioBP,
        uint256 forcedRebalanceThresholdBP,
        uint256 infraFeeBP,
        uint256 liquidityFeeBP,
        uint256 reservationFeeBP
    );
    event VaultConnectionUpdated(
        address indexed vault,
        address indexed nodeOperator,
        uint256 shareLimit,
        uint256 reserveRatioBP,
        uint256 forcedRebalanceThresholdBP
    );
    event VaultDisconnectInitiated(address indexed vault);
    event VaultDisconnectCompleted(address indexed vault);
    event VaultDisconnectAborted(address indexed vault, uint256 slashingReserve);
    event VaultOwnershipTransferred(address indexed vault, address indexed newOwner, address indexed oldOwner);
    event VaultReportApplied(
        address indexed vault,
        uint256 reportTimestamp,
        uint256 reportTotalValue,
        int256 reportInOutDelta,
        uint256 reportCumulativeLidoFees,
        uint256 reportLiabilityShares,
        uint256 reportMaxLiabilityShares,
        uint256 reportSlashingReserve
    );
    event LidoFeesSettled(
        address indexed vault, uint256 transferred, uint256 cumulativeLidoFees, uint256 settledLidoFees
    );
    event VaultInOutDeltaUpdated(address indexed vault, int256 inOutDelta);
    event VaultRebalanced(address indexed vault, uint256 sharesBurned, uint256 etherWithdrawn);
    event MintedSharesOnVault(address indexed vault, uint256 amountOfShares, uint256 lockedAmount);
    event BurnedSharesOnVault(address indexed vault, uint256 amountOfShares);
    event ForcedValidatorExitTriggered(address indexed vault, bytes pubkeys, address refundRecipient);

    error NotConnectedToHub(address vault);
    error InOutDeltaCacheIsOverwritten();
    error NotAuthorized();
    error ResumedExpected();

    LidoLocator private immutable LOCATOR;
    address[] private vaults;
    mapping(address => VaultConnection) private connections;
    mapping(address => Report) private reports;
    mapping(address => Obligations) private owed;

    constructor(LidoLocator locator) {
        LOCATOR = locator;
        vaults.push(address(0)); // indexes begin at 1
    }

    modifier onlyConnectionOwner(address vault) {
        if (!isVaultConnected(vault)) revert NotConnectedToHub(vault);
        if (connections[vault].owner != msg.sender) revert NotAuthorized();
        _;
    }

    function vaultsCount() external view returns (uint256) {
        return vaults.length - 1;
    }

    function vaultByIndex(uint256 _index) external view returns (address) {
        return vaults[_index];
    }

    function vaultConnection(address _vault) external view returns (VaultConnection memory) {
        return connections[_vault];
    }

    function isVaultConnected(address _vault) public view returns (bool) {
        return connections[_vault].vaultIndex != 0;
    }

    function isPendingDisconnect(address _vault) public view returns (bool) {
        uint48 since = connections[_vault].disconnectInitiatedTs;
        return since != 0 && since != type(uint48).max;
    }

    function isReportFresh(address _vault) external view returns (bool) {
        return block.timestamp - reports[_vault].timestamp < 2 days;
    }

    function latestReport(address _vault) external view returns (Report memory) {
        return reports[_vault];
    }

    function obligations(address _vault) external view returns (uint256 sharesToBurn, uint256 feesToSettle) {
        return (owed[_vault].sharesToBurn, owed[_vault].feesToSettle);
    }

    function setObligations(address vault, uint256 sharesToBurn, uint256 feesToSettle) external {
        owed[vault] = Obligations(sharesToBurn, feesToSettle);
    }

    /// By the owner of a vault, who has offered it to the hub before.
    function connectVault(address vault) external {
        StakingVault connected = StakingVault(payable(vault));
        if (connected.owner() != msg.sender) revert NotAuthorized();
        connected.acceptOwnership();
        VaultConnection storage connection = connections[vault];
        connection.owner = msg.sender;
        connection.shareLimit = 1000 ether;
        connection.vaultIndex = uint96(vaults.length);
        connection.disconnectInitiatedTs = type(uint48).max;
        connection.reserveRatioBP = 3000;
        connection.forcedRebalanceThresholdBP = 2500;
        connection.infraFeeBP = 100;
        connection.liquidityFeeBP = 650;
        vaults.push(vault);
        reports[vault].timestamp = uint48(block.timestamp);
        emit VaultConnected(vault, 1000 ether, 3000, 2500, 100, 650, 0);
    }

    function fund(address _vault) external payable onlyConnectionOwner(_vault) {
        emit VaultInOutDeltaUpdated(_vault, int256(_vault.balance + msg.value));
        StakingVault(payable(_vault)).fund{value: msg.value}();
    }

    function transferVaultOwnership(address vault, address newOwner) external onlyConnectionOwner(vault) {
        connections[vault].owner = newOwner;
        emit VaultOwnershipTransferred(vault, newOwner, msg.sender);
    }

    function voluntaryDisconnect(address vault) external onlyConnectionOwner(vault) {
        connections[vault].disconnectInitiatedTs = uint48(block.timestamp);
        emit VaultDisconnectInitiated(vault);
    }

    /// By the oracle. It completes a disconnect that was initiated before the report, unless something is reserved.
    function applyVaultReport(
        address vault,
        uint256 timestamp,
        uint256 totalValue,
        uint256 fees,
        uint256 liabilityShares,
        uint256 maxLiabilityShares,
        uint256 slashingReserve
    ) external {
        if (msg.sender != LOCATOR.lazyOracle()) revert NotAuthorized();
        if (!isVaultConnected(vault)) revert NotConnectedToHub(vault);
        if (isPendingDisconnect(vault) && connections[vault].disconnectInitiatedTs <= timestamp) {
            if (slashingReserve == 0 && liabilityShares == 0) return _disconnect(vault);
            connections[vault].disconnectInitiatedTs = type(uint48).max;
            emit VaultDisconnectAborted(vault, slashingReserve);
        }
        int256 delta = int256(vault.balance);
        reports[vault] = Report(uint104(totalValue), int104(delta), uint48(timestamp));
        emit VaultReportApplied(
            vault, timestamp, totalValue, delta, fees, liabilityShares, maxLiabilityShares, slashingReserve
        );
    }

    function _disconnect(address vault) private {
        VaultConnection memory connection = connections[vault];
        address last = vaults[vaults.length - 1];
        vaults[connection.vaultIndex] = last;
        connections[last].vaultIndex = connection.vaultIndex;
        vaults.pop();
        delete connections[vault];
        StakingVault(payable(vault)).transferOwnership(connection.owner);
        emit VaultDisconnectCompleted(vault);
    }
}
