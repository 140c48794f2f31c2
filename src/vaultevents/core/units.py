"""Integer and byte types of the chain, and their exact text forms (rules E5 to E8)."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NewType

from vaultevents.core.errors import InputError
from vaultevents.core.keccak import keccak

BlockNumber = NewType("BlockNumber", int)
Epoch = NewType("Epoch", int)
ValidatorIndex = NewType("ValidatorIndex", int)
Wei = NewType("Wei", int)
Address = NewType("Address", bytes)  # 20 bytes
Hash32 = NewType("Hash32", bytes)  # 32 bytes
Pubkey = NewType("Pubkey", bytes)  # 48 bytes

WEI_PER_ETH = 10**18
WEI_PER_GWEI = 10**9

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}")


def eth_text(wei: int) -> str:
    """Exact decimal ETH: no exponent, no trailing zeros, no trailing point; `0` for nothing (rule E7)."""
    if wei < 0:
        raise ValueError(f"an amount cannot be negative: {wei}")
    whole, fraction = divmod(wei, WEI_PER_ETH)
    return f"{whole}.{fraction:018d}".rstrip("0").rstrip(".")


def hex_text(data: bytes) -> str:
    """`0x` and lower-case hex: the form of hashes, pubkeys and calldata (rule E6)."""
    return f"0x{data.hex()}"


@lru_cache(maxsize=16384)
def checksum(address: bytes) -> str:
    """The EIP-55 form of a 20-byte address (rule E6)."""
    if len(address) != 20:
        raise ValueError(f"an address has 20 bytes, got {len(address)}")
    plain = address.hex()
    digest = keccak(plain.encode()).hex()
    return "0x" + "".join(c.upper() if int(d, 16) >= 8 else c for c, d in zip(plain, digest[:40], strict=True))


def parse_address(text: str) -> Address:
    """An address as a person writes it. One in mixed case must carry a right EIP-55 checksum.

    Raises `InputError` with what to do.
    """
    if not _ADDRESS.fullmatch(text):
        raise InputError(f"'{text}' is not an address: expected 0x and 40 hexadecimal digits")
    address = Address(bytes.fromhex(text[2:]))
    digits = text[2:]
    if digits not in (digits.lower(), digits.upper()) and text != checksum(address):
        raise InputError(
            f"'{text}' has a wrong checksum (EIP-55), so a character is probably mistyped: "
            f"copy the address again, or write it all in lower case if you are sure (then it is {checksum(address)})"
        )
    return address
