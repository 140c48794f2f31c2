"""Work in pieces, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


async def together(work: Iterable[Callable[[], Awaitable[T]]], at_once: int) -> list[T]:
    """Run at most `at_once` at a time and return the results in order; the first error cancels the rest."""
    turns = asyncio.Semaphore(at_once)

    async def run(begin: Callable[[], Awaitable[T]]) -> T:
        async with turns:
            return await begin()

    tasks = [asyncio.ensure_future(run(begin)) for begin in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def chunks(items: Sequence[S], size: int) -> Iterable[Sequence[S]]:
    """Cut `items` into pieces of at most `size`."""
    return (items[at : at + size] for at in range(0, len(items), size))
