"""The line of a log that two operators compare, written out."""

from __future__ import annotations

import pytest

from vaultevents.core.log_digest import fact_line
from vaultevents.core.logs import Log
from vaultevents.core.units import Address, Hash32

pytestmark = pytest.mark.unit

LOG = Log(
    address=Address(b"\xab" * 20),
    topics=(Hash32(b"\x01" * 32), Hash32(b"\xfe" * 32)),
    data=b"\x00\x07",
    block_number=19_000_000,
    block_hash=Hash32(b"\x0b" * 32),
    tx_hash=Hash32(b"\x0c" * 32),
    log_index=12,
    timestamp_s=1_700_000_000,
)


def test_a_fact_is_one_line_of_hexadecimal_in_lower_case() -> None:
    assert fact_line(LOG) == (
        b"19000000 0x" + b"0b" * 32 + b" 0x" + b"0c" * 32 + b" 12 0x" + b"ab" * 20
        + b" 0x" + b"01" * 32 + b",0x" + b"fe" * 32 + b" 0x0007\n"
    )  # fmt: skip


def test_no_data_is_0x_alone_and_what_only_some_nodes_tell_is_left_out() -> None:
    assert fact_line(Log(LOG.address, LOG.topics[:1], b"", 1, LOG.block_hash, LOG.tx_hash, 0)).endswith(b"01 0x\n")
    untimed = Log(LOG.address, LOG.topics, LOG.data, 19_000_000, LOG.block_hash, LOG.tx_hash, 12)
    assert fact_line(untimed) == fact_line(LOG)
