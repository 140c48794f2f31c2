"""What two operators compare: the contract logs of a range as lines, independent of what either has registered."""

from __future__ import annotations

from vaultevents.core.logs import Log
from vaultevents.core.units import hex_text


def fact_line(log: Log) -> bytes:
    """One log of the contracts as a line of ASCII, with a line feed at its end.

    `block_number block_hash tx_hash log_index address topics data`, one space between: numbers in decimal, the rest
    in lower-case hexadecimal after `0x` (`0x` alone for no data), topics in order with commas between. The digest of
    a range is the SHA-256 over the lines of its logs with one of the two topics (`TOPICS`), by block, then log index.
    """
    topics = ",".join(map(hex_text, log.topics))
    words = (hex_text(log.block_hash), hex_text(log.tx_hash), str(log.log_index), hex_text(log.address))
    return f"{log.block_number} {' '.join(words)} {topics} {hex_text(log.data)}\n".encode()
