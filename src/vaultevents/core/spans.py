"""Inclusive ranges of positions (blocks or epochs), and which one to take next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """All positions from `first` to `last`, both included; never empty."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.last < self.first:
            raise ValueError(f"not a span: {self.first}..{self.last}")

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __contains__(self, position: int) -> bool:
        return self.first <= position <= self.last

    def __str__(self) -> str:
        return f"{self.first}..{self.last}"


def next_span(position: int, head: int, step: int, stop: int | None) -> Span | None:
    """The span after `position`: at most `step` long, not beyond `head` nor `stop`; None when there is none."""
    if step < 1:
        raise ValueError("step must be at least 1")
    last = min(position + step, head if stop is None else min(head, stop))
    return Span(position + 1, last) if last > position else None


def next_step(step: int, longest: int, seen: int, most: int) -> int:
    """How long the next span is, after one of `step` gave `seen` records where `most` are wanted; at most `longest`."""
    if seen > most:
        return max(1, step * most // seen)
    return min(longest, 2 * step) if 4 * seen < most else step


def subtract(span: Span, others: Iterable[Span]) -> list[Span]:
    """What of `span` lies in none of `others`, in order."""
    left: list[Span] = []
    first = span.first
    for other in sorted(others):
        if other.last < first or other.first > span.last:
            continue
        if other.first > first:
            left.append(Span(first, other.first - 1))
        first = other.last + 1
    if first <= span.last:
        left.append(Span(first, span.last))
    return left
