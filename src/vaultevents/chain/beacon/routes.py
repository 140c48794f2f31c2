"""Routes of the Beacon API that are asked; those of validators are in `validators_by_id.py`."""

from __future__ import annotations

from typing import Final

SYNCING: Final = "/eth/v1/node/syncing"
GENESIS: Final = "/eth/v1/beacon/genesis"
CONFIG: Final = "/eth/v1/config/spec"
CHECKPOINTS: Final = "/eth/v1/beacon/states/head/finality_checkpoints"
HEADERS: Final = "/eth/v1/beacon/headers/"
BLINDED_BLOCKS: Final = "/eth/v1/beacon/blinded_blocks/"
BLOCKS: Final = "/eth/v2/beacon/blocks/"
STATE: Final = "/eth/v2/debug/beacon/states/finalized"
