"""Versions that name a state: random for each change, so that no two states of two copies of a database share one.

A counter would not do: a copy that lacks the last change counts on to the same number with another content.
"""

from __future__ import annotations

from typing import Literal

from vaultevents.store.sessions import Connection

NEW_VERSION = "('x' || md5(gen_random_uuid()::text))::bit(63)::bigint"
"""A random number from 0 to 2^63 - 1."""


async def change_version(connection: Connection, table: Literal["registry", "key_ring"]) -> None:
    """Give the registry or the key ring a new version, inside the transaction of its change."""
    await connection.execute(f"update {table} set version = {NEW_VERSION}")  # noqa: S608 - both are named here
