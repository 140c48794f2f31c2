"""The transaction of a customer's change: token, step-up code and change commit or fail together (rules A13 and A15).

async with mutation(database, grant, key) as change:
    ...                        # look and validate; whatever is raised takes everything back
    await change.step_up()     # now the code is consumed
    ...                        # and the change made

What changes nothing of a webhook, a resend for one, is an `action`: it spends its token and needs no code.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from vaultevents.core.errors import VaulteventsError
from vaultevents.core.sealing import MasterKey, open_sealed
from vaultevents.core.totp import STEP_S, is_code, lock_s, matching_step
from vaultevents.store.mfa import seed_aad
from vaultevents.store.pool import Connection, Database
from vaultevents.store.registry import lock_registry


@dataclass(frozen=True, slots=True)
class Authorization:
    """What a verified request brings: `token_digest` names its token, `code` is the step-up code as it was sent.

    `now_s` is the service clock (rule D15).
    """

    account_id: str
    token_digest: bytes
    code: str | None
    now_s: float


class TokenReplayed(VaulteventsError):
    """The token has made its change already."""


class StepUpRefused(VaulteventsError):
    """The request does not step up; the text says what to do. `retry_after_s` is set for `locked`."""

    def __init__(
        self,
        reason: Literal["not_enrolled", "required", "malformed", "invalid", "locked"],
        detail: str,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retry_after_s = retry_after_s


class _WrongCode(Exception):
    """A guess: it is counted, and nothing else is done."""


class AuthorizedTransaction:
    """One change under way; the registry is locked."""

    def __init__(self, connection: Connection, grant: Authorization, key: MasterKey, factor: Any) -> None:
        self.connection = connection
        self.account_id = grant.account_id
        self.stepped_up = False
        self._grant = grant
        self._key = key
        self._factor = factor

    async def step_up(self) -> None:
        """Consumes the code: each time step is accepted once. Raises `StepUpRefused`."""
        factor, code = self._factor, self._grant.code
        if factor is None:
            raise StepUpRefused(
                "not_enrolled", "this account has no second factor: ask the operator to enrol one, then send its code"
            )
        if factor["locked_s"] > 0:
            raise _locked(factor["locked_s"])
        if code is None:
            raise StepUpRefused("required", "send the present code of the second factor as the header 'X-MFA-Code'")
        if not is_code(code):  # no guess: it cannot be right
            raise StepUpRefused("malformed", "the header 'X-MFA-Code' has to be six digits, without a space")
        seed = open_sealed(self._key, factor["sealed"], seed_aad(self.account_id))
        step = matching_step(seed, code, self._grant.now_s)
        if step is None:
            raise _WrongCode
        if step <= factor["last_step"]:  # no guess: it was right once
            raise StepUpRefused("invalid", f"this code was used already: wait up to {STEP_S} s for the next one")
        await self.connection.execute(
            "update mfa_factors set last_step = $2, failures = 0, locked_until = null where account_id = $1",
            self.account_id,
            step,
        )
        self.stepped_up = True


@asynccontextmanager
async def mutation(database: Database, grant: Authorization, key: MasterKey) -> AsyncIterator[AuthorizedTransaction]:
    """Raises `TokenReplayed`, `StepUpRefused`, and whatever the change raises; then nothing was done, no code and no
    token is spent. A wrong code alone leaves its mark: it is counted, and may lock the factor.
    """
    refused: StepUpRefused | None = None
    async with database.of_account(grant.account_id) as connection:
        await lock_registry(connection)
        factor = await connection.fetchrow(_FACTOR, grant.account_id)  # guesses queue here, so each one is counted
        try:
            async with connection.transaction():
                await _spend(connection, grant)
                change = AuthorizedTransaction(connection, grant, key, factor)
                yield change
                if not change.stepped_up:
                    raise RuntimeError("a change without step-up")
        except _WrongCode:
            refused = await _count(connection, grant.account_id)
    if refused is not None:
        raise refused


@asynccontextmanager
async def action(database: Database, grant: Authorization) -> AsyncIterator[Connection]:
    """The transaction of a request that changes nothing of a webhook and so needs no code: only its token is spent.

    Raises `TokenReplayed`, and whatever the action raises; then nothing was done and no token is spent.
    """
    async with database.of_account(grant.account_id) as connection:
        await _spend(connection, grant)
        yield connection


_FACTOR = """
select sealed, last_step, greatest(0, extract(epoch from locked_until - db_now()))::float8 as locked_s
from mfa_factors where account_id = $1 for update
"""


async def _spend(connection: Connection, grant: Authorization) -> None:
    spent = await connection.fetchval(
        "insert into used_tokens (digest, account_id) values ($1, $2) on conflict do nothing returning 1",
        grant.token_digest,
        grant.account_id,
    )
    if spent is None:
        raise TokenReplayed


async def _count(connection: Connection, account_id: str) -> StepUpRefused:
    failures = await connection.fetchval(
        "update mfa_factors set failures = failures + 1 where account_id = $1 returning failures", account_id
    )
    seconds = lock_s(failures)
    if seconds is None:
        return StepUpRefused("invalid", "the step-up code is wrong: send the present six digits")
    await connection.execute(
        "update mfa_factors set locked_until = db_now() + make_interval(secs => $2) where account_id = $1",
        account_id,
        float(seconds),
    )
    return _locked(seconds)


def _locked(seconds: float) -> StepUpRefused:
    whole = math.ceil(seconds)
    return StepUpRefused("locked", f"too many wrong codes: step-up is locked for {whole} s more", whole)


async def forget(database: Database) -> None:
    """Remove what is no longer needed: tokens after a minute, answers to creates after a day (rules A13 and A16)."""
    async with database.transaction() as connection:
        await connection.execute("delete from used_tokens where used_at < db_now() - interval '60 s'")
        await connection.execute("delete from idempotent_answers where created_at < db_now() - interval '24 h'")
