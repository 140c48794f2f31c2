"""Kinds of things that happen, dealt like cards: at random, yet none is missing for long."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Generic, TypeVar

Card = TypeVar("Card")


class Deck(Generic[Card]):
    """So many copies of each card, shuffled and dealt to the end, then all over again."""

    def __init__(self, rng: Random, copies: Mapping[Card, int]) -> None:
        self._rng = rng
        self._cards = [card for card, count in copies.items() for _ in range(count)]
        self._left: list[Card] = []

    def deal(self) -> Card:
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        return self._left.pop()
