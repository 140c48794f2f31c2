"""eth_getLogs selects exactly what a filter written the slow way selects, filler logs included."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest

from vaultevents.devnet.blocks import Log, PlacedLog, filler, own_logs
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.logquery import logs_of_block, logs_of_range, parse_filter
from vaultevents.devnet.rpc import RpcError

pytestmark = pytest.mark.integration

ADDRESSES = [bytes([n]) * 20 for n in range(3)]
TOPICS = [bytes([n]) * 32 for n in range(3)]


def tangled_chain() -> Chain:
    rng, chain = Random(3), Chain(3)
    for _ in range(30):
        chain.filler_logs = rng.choice([0, 0, 5])
        logs = [
            Log(rng.choice(ADDRESSES), tuple(rng.choices(TOPICS, k=rng.randint(0, 4))), b"")
            for _ in range(rng.randint(0, 6))
        ]
        chain.mine([chain.transaction(logs[:2]), chain.transaction(logs[2:])])
    return chain


def everything(chain: Chain, first: int, last: int) -> list[PlacedLog]:
    blocks = [block for number in range(first, last + 1) if (block := chain.block(number))]
    return [one for block in blocks for one in [*own_logs(block), *filler(block)]]


def as_set(value: Any) -> set[str] | None:
    values = value if isinstance(value, list) else [value]
    return None if None in values or not values else set(values)


def slow_match(log: Log, address: Any, topics: list[Any]) -> bool:
    addresses = as_set(address)
    if addresses is not None and "0x" + log.address.hex() not in addresses:
        return False
    if len(log.topics) < len(topics):
        return False
    return all(
        (wanted := as_set(topic)) is None or "0x" + log.topics[at].hex() in wanted for at, topic in enumerate(topics)
    )


def places(logs: list[PlacedLog]) -> list[tuple[int, int, bytes]]:
    return [(log.block.number, log.log_index, log.tx_hash) for log in logs]


def test_answers_equal_a_brute_force_filter() -> None:
    chain = tangled_chain()
    full = next(block for number in range(31) if (block := chain.block(number)) and block.filler_logs)
    foreign = filler(full)[1].log
    hexed = [["0x" + value.hex() for value in values] for values in (ADDRESSES, TOPICS)]
    addresses = [None, [], hexed[0][0], hexed[0][1:], "0x" + foreign.address.hex()]
    position = [None, hexed[1][0], hexed[1][:2], "0x" + foreign.topics[0].hex()]
    several = 0
    for address, first, second in product(addresses, position, position):
        for topics in ([], [first], [first, second]):
            wanted = parse_filter({"address": address, "topics": topics})
            for span in ((0, 30), (7, 19), (4, 4)):
                right = [one for one in everything(chain, *span) if slow_match(one.log, address, topics)]
                assert places(logs_of_range(chain, *span, wanted)) == places(right)
                several += len(right) > 1
            right = [one for one in everything(chain, full.number, full.number) if slow_match(one.log, address, topics)]
            assert places(logs_of_block(full, wanted)) == places(right)
    assert several > 100


def test_filler_logs_are_the_same_whenever_they_are_asked_for() -> None:
    first, second = tangled_chain(), tangled_chain()
    assert [one.log for one in everything(first, 0, 30)] == [one.log for one in everything(second, 0, 30)]


@pytest.mark.parametrize(
    "query",
    [
        {"address": "0x12"},
        {"address": 5},
        {"topics": ["0x" + "00" * 31]},
        {"topics": [None] * 5},
        {"topics": "0x" + "00" * 32},
    ],
)
def test_a_malformed_filter_is_refused(query: dict[str, Any]) -> None:
    with pytest.raises(RpcError):
        parse_filter(query)
