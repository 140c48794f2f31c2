"""Customers who change things, each time with a fresh token and a fresh code of their second factor."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

import pyotp

from store_factories import KEY
from vaultevents.core.totp import STEP_S, new_seed
from vaultevents.store import mfa
from vaultevents.store.authorized_transaction import Authorization, AuthorizedTransaction, mutation
from vaultevents.store.pool import Database

_serial = count(1)


def fresh_bytes(size: int) -> bytes:
    """Bytes that nobody else got: what is random outside of tests."""
    return hashlib.sha256(b"fresh %d" % next(_serial)).digest()[:size]


@dataclass
class Customer:
    """An account with a second factor, and the time on its clock."""

    account_id: str
    seed: str
    now_s: float = 1_800_000_000.0

    def code(self) -> str:
        """The code of this moment."""
        return pyotp.HOTP(self.seed).at(int(self.now_s // STEP_S))

    def grant(self, code: str | None = None) -> Authorization:
        """What a request half a minute after the last one brings: a token of its own, and its code or the given one."""
        self.now_s += STEP_S
        return Authorization(self.account_id, fresh_bytes(32), code or self.code(), self.now_s)

    def wrong_grant(self) -> Authorization:
        """Likewise, with six digits that no step near has."""
        step = int(self.now_s // STEP_S)
        right = {pyotp.HOTP(self.seed).at(near) for near in range(step - 2, step + 5)}
        return self.grant(next(code for code in map("{:06}".format, range(10)) if code not in right))


async def enrolled(database: Database, account_id: str = "acme") -> Customer:
    """Gives an account its second factor."""
    seed = new_seed(fresh_bytes(20))
    await mfa.enroll(database, account_id, seed, KEY, fresh_bytes(12))
    return Customer(account_id, seed.reveal())


@asynccontextmanager
async def changing(database: Database, customer: Customer) -> AsyncIterator[AuthorizedTransaction]:
    """A change by a customer who steps up."""
    async with mutation(database, customer.grant(), KEY) as change:
        await change.step_up()
        yield change
