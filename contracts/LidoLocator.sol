// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// Names the contracts of the protocol; anybody may point it elsewhere.
contract LidoLocator {
    address public lazyOracle;
    address public vaultHub;
    address public vaultFactory;
    address public operatorGrid;
    address public predepositGuarantee;
    address public accountingOracle;
    address public withdrawalQueue;

    function point(
        address lazyOracle_,
        address vaultHub_,
        address vaultFactory_,
        address operatorGrid_,
        address predepositGuarantee_,
        address accountingOracle_,
        address withdrawalQueue_
    ) external {
        (lazyOracle, vaultHub, vaultFactory, operatorGrid) = (lazyOracle_, vaultHub_, vaultFactory_, operatorGrid_);
        (predepositGuarantee, accountingOracle, withdrawalQueue) =
            (predepositGuarantee_, accountingOracle_, withdrawalQueue_);
    }
}
