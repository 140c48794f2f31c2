"""Keccak-256 as Ethereum uses it (Yellow Paper, appendix A), which is not the later SHA3-256.

A backfill hashes a dozen short texts for each block with events, and there the call itself is the cost: `safe-pysha3`
takes an eighth of pycryptodome's time. It has wheels for Linux only, so elsewhere pycryptodome hashes.
"""

from __future__ import annotations

try:
    from eth_hash.backends.pysha3 import keccak256 as keccak
except ImportError:
    from eth_hash.backends.pycryptodome import keccak256 as keccak

__all__ = ["keccak"]
