// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// An upgradeable contract, in the storage slots of ERC-1967; its admin may upgrade it until it is ossified.
contract OssifiableProxy {
    event Upgraded(address indexed implementation);
    event AdminChanged(address previousAdmin, address newAdmin);
    event ProxyOssified();

    error NotAdmin();

    bytes32 private constant IMPLEMENTATION = bytes32(uint256(keccak256("eip1967.proxy.implementation")) - 1);
    bytes32 private constant ADMIN = bytes32(uint256(keccak256("eip1967.proxy.admin")) - 1);

    constructor(address implementation, address admin) {
        _store(ADMIN, admin);
        emit AdminChanged(address(0), admin);
        _store(IMPLEMENTATION, implementation);
        emit Upgraded(implementation);
    }

    receive() external payable {
        _delegate();
    }

    fallback() external payable {
        _delegate();
    }

    function proxy__getAdmin() external view returns (address) {
        return _load(ADMIN);
    }

    function proxy__getImplementation() external view returns (address) {
        return _load(IMPLEMENTATION);
    }

    function proxy__getIsOssified() external view returns (bool) {
        return _load(ADMIN) == address(0);
    }

    function proxy__upgradeTo(address implementation) external {
        if (msg.sender != _load(ADMIN)) revert NotAdmin();
        _store(IMPLEMENTATION, implementation);
        emit Upgraded(implementation);
    }

    function proxy__ossify() external {
        if (msg.sender != _load(ADMIN)) revert NotAdmin();
        emit AdminChanged(msg.sender, address(0));
        _store(ADMIN, address(0));
        emit ProxyOssified();
    }

    function _load(bytes32 slot) private view returns (address value) {
        assembly {
            value := sload(slot)
        }
    }

    function _store(bytes32 slot, address value) private {
        assembly {
            sstore(slot, value)
        }
    }

    function _delegate() private {
        address implementation = _load(IMPLEMENTATION);
        assembly {
            calldatacopy(0, 0, calldatasize())
            let done := delegatecall(gas(), implementation, 0, calldatasize(), 0, 0)
            returndatacopy(0, 0, returndatasize())
            switch done
            case 0 { revert(0, returndatasize()) }
            default { return(0, returndatasize()) }
        }
    }
}
