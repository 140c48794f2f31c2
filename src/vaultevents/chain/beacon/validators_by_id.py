"""Validator records by index or public key: one POST for a thousand, or GET in small steps where a node refuses that.

POST came with Beacon API 2.5. An empty list of ids means *all* validators there, so none is ever sent. A node drops
ids that it does not know without an error, so every answer is compared with what was asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TypeVar

from vaultevents.chain.beacon import wire
from vaultevents.chain.beacon.node import BeaconCounters, BeaconNode
from vaultevents.core.errors import NodeFault
from vaultevents.core.units import Pubkey, hex_text
from vaultevents.core.validators import ValidatorRecord

K = TypeVar("K", int, Pubkey)

VALIDATORS = "/eth/v1/beacon/states/finalized/validators"
_NO_POST = frozenset({400, 404, 405, 415, 501})


@dataclass(frozen=True, slots=True)
class IdLists:
    """How many ids go into one call, each at least 1."""

    per_post: int
    per_get: int
    counters: BeaconCounters

    async def all_of(self, node: BeaconNode, asked: Sequence[int]) -> list[ValidatorRecord]:
        """The records of `asked`, ascending indices that exist; raises `NodeFault` when one is missing."""
        found: list[ValidatorRecord] = []
        while len(found) < len(asked):
            part, records = await self._next(node, asked[len(found) :])
            _check_all_there(node, part, records)
            found += records
        return found

    async def run_from(self, node: BeaconNode, first: int, most: int) -> list[ValidatorRecord]:
        """The records from index `first` on, as many as exist, at most `most`; raises `NodeFault` for a gap."""
        found: list[ValidatorRecord] = []
        while len(found) < most:
            part, records = await self._next(node, range(first + len(found), first + most))
            if [record.index for record in records] != list(part[: len(records)]):
                raise NodeFault(node.name, f"its validators from {part[0]} on have a gap")
            found += records
            if len(records) < len(part):  # later ones would be of a later state
                break
        return found

    async def known_and_new(
        self, node: BeaconNode, known: Sequence[int], first: int, step: int
    ) -> tuple[list[ValidatorRecord], list[ValidatorRecord]]:
        """The records of `known`, ascending indices that exist, and all from index `first` on, `step` of them at once.

        An index may be in both lists. Raises `NodeFault` when a known one is missing, and for a gap in the newest.
        """
        exist, found = set(known), dict[int, ValidatorRecord]()

        def new_from(index: int) -> list[int]:
            return list(islice((new for new in count(index) if new not in exist), step))

        ids = [*known, *new_from(first)]
        while ids:
            part, records = await self._next(node, ids)
            _check_all_there(node, [index for index in part if index in exist], records)
            found.update((record.index, record) for record in records)
            if len(records) < len(part):  # later ones would be of a later state
                break
            ids = ids[len(part) :] or new_from(ids[-1] + 1)
        newest = [found[index] for index in sorted(found) if index >= first]
        if [record.index for record in newest] != list(range(first, first + len(newest))):
            raise NodeFault(node.name, f"its validators from {first} on have a gap")
        return [found[index] for index in known], newest

    async def of_pubkeys(self, node: BeaconNode, pubkeys: Sequence[Pubkey]) -> list[ValidatorRecord]:
        """The records of those of `pubkeys` that the state has, each once; a deposit may still wait, or be invalid."""
        found: list[ValidatorRecord] = []
        done = 0
        while done < len(pubkeys):
            part, records = await self._ask(node, pubkeys[done:])
            _check_none_else(node, part, [record.pubkey for record in records])
            found += records
            done += len(part)
        return found

    async def _next(self, node: BeaconNode, ids: Sequence[int]) -> tuple[Sequence[int], list[ValidatorRecord]]:
        """The first of `ids`, as many as go into one call, and the records that the node has of them, by index."""
        part, records = await self._ask(node, ids)
        _check_none_else(node, part, [record.index for record in records])
        return part, records

    async def _ask(self, node: BeaconNode, ids: Sequence[K]) -> tuple[Sequence[K], list[ValidatorRecord]]:
        part = ids[: self.per_post]
        content = None
        if node.takes_post:
            content = await node.post(VALIDATORS, {"ids": [_text(validator) for validator in part]}, _NO_POST)
        if not isinstance(content, bytes):
            part = ids[: self.per_get]
            content = await node.get(VALIDATORS, [_text(validator) for validator in part])
            node.takes_post = False
            self.counters.posts_refused += 1
        return part, sorted(wire.validators(node.name, content), key=lambda record: record.index)


def _text(validator: int | Pubkey) -> str:
    return str(validator) if isinstance(validator, int) else hex_text(validator)


def _check_none_else(node: BeaconNode, asked: Sequence[K], given: Sequence[K]) -> None:
    if len(set(given)) < len(given) or not set(given).issubset(asked):
        raise NodeFault(node.name, f"asked for {len(asked)} validators, it gives another one, or one of them twice")


def _check_all_there(node: BeaconNode, asked: Sequence[int], records: Sequence[ValidatorRecord]) -> None:
    missing = set(asked).difference(record.index for record in records)
    if missing:
        problem = (
            f"gives {len(asked) - len(missing)} of {len(asked)} validators; {min(missing)} is missing, which exists"
        )
        raise NodeFault(node.name, problem)
