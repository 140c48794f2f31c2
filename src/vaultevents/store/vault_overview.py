# ruff: noqa: S608 - statements are put together from constants of this module alone

"""Read accounts and vaults for an operator: validators by state, amounts by day, the last report; bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

from vaultevents.core.events import FundingReceived, ReportUpdateAvailable, WithdrawalClaimed
from vaultevents.core.units import WEI_PER_ETH
from vaultevents.store.pool import Connection, Record
from vaultevents.store.sessions import in_index_order

LOOKED_AT: Final = 10_000
"""How many of the newest events of an account the amounts of a vault are taken from."""
REPORTS: Final = 30
"""How many of the newest reports are looked at for the last one of a vault."""
DAYS: Final = 30


@dataclass(frozen=True, slots=True)
class ValidatorCounts:
    """Validators of one vault by their state in the last known epoch; all zero where none was found."""

    pending: int = 0
    active: int = 0
    exited: int = 0

    @property
    def total(self) -> int:
        return self.pending + self.active + self.exited


@dataclass(frozen=True, slots=True)
class SpanFacts:
    """Blocks for which a vault is registered; `last` None: it is registered now."""

    first: int
    last: int | None
    deliver_from: int


@dataclass(frozen=True, slots=True)
class VaultRow:
    """A vault with its validators; `registered`: now."""

    account_id: str
    id: str
    address: bytes
    queue: bytes | None
    created_at: datetime
    spans: tuple[SpanFacts, ...]
    validators: ValidatorCounts

    @property
    def registered(self) -> bool:
        return bool(self.spans) and self.spans[-1].last is None


@dataclass(frozen=True, slots=True)
class VaultPage:
    """Vaults by account and id; `next_after` is where the next page begins; None: no others."""

    rows: tuple[VaultRow, ...]
    next_after: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class ReportFacts:
    """The newest report with an event for the vault. `at` is the time of the report, `event_id` names its event."""

    timestamp: int
    at: datetime
    block_number: int
    event_id: str


@dataclass(frozen=True, slots=True)
class Day:
    """What happened to one vault on one day (UTC); amounts in wei."""

    day: date
    fundings: int
    funded_wei: int
    claims: int
    claimed_wei: int


@dataclass(frozen=True, slots=True)
class Daily:
    """The last days, oldest first, none left out. `since`: only events from then on were looked at; None: all."""

    days: tuple[Day, ...]
    since: datetime | None


@dataclass(frozen=True, slots=True)
class AccountRow:
    """An account and what belongs to it; `step_up`: it has a second factor."""

    id: str
    name: str
    created_at: datetime
    vaults: int
    webhooks: int
    keys: int
    step_up: bool


@dataclass(frozen=True, slots=True)
class AccountPage:
    """Accounts by id; `next_after` is where the next page begins; None: no others."""

    rows: tuple[AccountRow, ...]
    next_after: str | None


async def accounts(connection: Connection, after: str = "", limit: int = 50) -> AccountPage:
    """Return the accounts whose ids come after `after`; vaults and keys count while they are registered and valid."""
    rows = await connection.fetch(_ACCOUNTS, after, limit + 1)
    found = tuple(AccountRow(**row) for row in rows[:limit])
    return AccountPage(found, found[-1].id if len(rows) > limit else None)


async def account(connection: Connection, account_id: str) -> AccountRow | None:
    """Return one account."""
    row = await connection.fetchrow(_ACCOUNT, account_id)
    return None if row is None else AccountRow(**row)


_ACCOUNT_FACTS = """
select a.id, a.name, a.created_at,
    (select count(*) from vault_spans s where s.account_id = a.id and s.last_block is null) as vaults,
    (select count(*) from webhooks w where w.account_id = a.id and w.deleted_at is null) as webhooks,
    (select count(*) from api_keys k where k.account_id = a.id and k.revoked_at is null) as keys,
    exists (select from mfa_factors f where f.account_id = a.id) as step_up
from
"""

_ACCOUNTS = f"{_ACCOUNT_FACTS} (select * from accounts where id > $1 order by id limit $2) a order by a.id"
_ACCOUNT = f"{_ACCOUNT_FACTS} accounts a where a.id = $1"


async def vaults(
    connection: Connection, account_id: str | None = None, after: tuple[str, str] = ("", ""), limit: int = 50
) -> VaultPage:
    """Return the vaults of an account or of all, those after the vault `after` (account and id)."""
    rows = await connection.fetch(_VAULTS, account_id, *after, limit + 1)
    found = await _with_validators(connection, rows[:limit])
    return VaultPage(found, (found[-1].account_id, found[-1].id) if len(rows) > limit else None)


async def vault(connection: Connection, account_id: str, vault_id: str) -> VaultRow | None:
    """Return one vault, also one that is not registered any longer."""
    rows = await connection.fetch("select * from vaults where account_id = $1 and id = $2", account_id, vault_id)
    found = await _with_validators(connection, rows)
    return found[0] if found else None


_VAULTS = """
select * from vaults where (account_id, id) > ($2, $3) and ($1::text is null or account_id = $1)
order by account_id, id limit $4
"""


async def _with_validators(connection: Connection, rows: Sequence[Record]) -> tuple[VaultRow, ...]:
    spans = await connection.fetch(_SPANS, [row["account_id"] for row in rows], [row["id"] for row in rows])
    counted = await connection.fetch(_VALIDATORS, [row["address"] for row in rows])
    counts = {row["address"]: ValidatorCounts(row["pending"], row["active"], row["exited"]) for row in counted}
    return tuple(
        VaultRow(
            row["account_id"],
            row["id"],
            row["address"],
            row["queue"],
            row["created_at"],
            tuple(
                SpanFacts(span["first_block"], span["last_block"], span["deliver_from"])
                for span in spans
                if (span["account_id"], span["vault_id"]) == (row["account_id"], row["id"])
            ),
            counts.get(row["address"], ValidatorCounts()),
        )
        for row in rows
    )


_SPANS = """
select s.* from unnest($1::text[], $2::text[]) v (account_id, id)
    join vault_spans s on s.account_id = v.account_id and s.vault_id = v.id
order by s.account_id, s.vault_id, s.ordinal
"""

# A validator whose epoch is not reached yet is in the state before it. The table has those of registered vaults alone.
_VALIDATORS = """
select substring(v.credentials from 13) as address,
    (count(*) filter (where v.activation_epoch is null or v.activation_epoch > d.known_through))::integer as pending,
    (count(*) filter (where v.activation_epoch <= d.known_through
        and (v.exit_epoch is null or v.exit_epoch > d.known_through)))::integer as active,
    (count(*) filter (where v.exit_epoch <= d.known_through))::integer as exited
from validators v cross join (select coalesce(known_through, 0) as known_through from discovery) d
where substring(v.credentials from 13) = any ($1::bytea[]) group by 1
"""


async def last_report(connection: Connection, account_id: str, vault_id: str) -> ReportFacts | None:
    """Return the newest report that has an event for the vault, among the newest `REPORTS`; None: there is none."""
    prefix = f"{ReportUpdateAvailable.event_type}_{account_id}_{vault_id}_"
    row = await connection.fetchrow(_LAST_REPORT, account_id, prefix, REPORTS)
    if row is None:
        return None
    timestamp = int(row["report_timestamp"])
    return ReportFacts(timestamp, datetime.fromtimestamp(timestamp, UTC), row["block_number"], row["event_id"])


_LAST_REPORT = """
select r.report_timestamp, r.block_number, e.id as event_id from (
    select report_timestamp, block_number from reports order by block_number desc, log_index desc limit $3
) r cross join lateral (
    select id from events where account_id = $1 and id = $2 || r.report_timestamp offset 0
) e order by r.block_number desc limit 1
"""


async def daily(connection: Connection, account_id: str, vault_id: str, now: datetime, days: int = DAYS) -> Daily:
    """Sum up fundings and claims of a vault by day (UTC), from the newest `LOOKED_AT` events of its account."""
    today = now.astimezone(UTC).date()
    first = today - timedelta(days=days - 1)
    begin = datetime(first.year, first.month, first.day, tzinfo=UTC)
    begin_ms = int(begin.timestamp()) * 1000
    types = (FundingReceived.event_type, WithdrawalClaimed.event_type)
    async with in_index_order(connection):
        seen = await connection.fetchrow(_SEEN, account_id, begin_ms, LOOKED_AT)
        rows = await connection.fetch(_DAILY, account_id, begin_ms, LOOKED_AT, vault_id, *types, WEI_PER_ETH)
    by_day = {row["day"]: row for row in rows}
    every = (first + timedelta(days=number) for number in range(days))
    cut_off = seen["number"] >= LOOKED_AT
    since = begin + timedelta(milliseconds=seen["last_ms"] - begin_ms) if cut_off else None
    return Daily(tuple(_day(day, by_day.get(day)) for day in every), since)


def _day(day: date, row: Record | None) -> Day:
    if row is None:
        return Day(day, 0, 0, 0, 0)
    return Day(day, row["fundings"], int(row["funded_wei"]), row["claims"], int(row["claimed_wei"]))


_SEEN = """
select count(*) as number, min(created_at_ms) as last_ms from (
    select created_at_ms from events where account_id = $1 and created_at_ms >= $2
    order by created_at_ms desc limit $3
) seen
"""

_DAILY = """
with amounts as (
    select date_trunc('day', to_timestamp(e.created_at_ms / 1000) at time zone 'UTC')::date as day, e.event_type,
        (convert_from(e.body, 'UTF8')::jsonb) -> 'payload' as payload
    from (
        select vault_id, event_type, created_at_ms, body, orphaned_at from events
        where account_id = $1 and created_at_ms >= $2 order by created_at_ms desc limit $3
    ) e where e.vault_id = $4 and e.event_type in ($5, $6) and e.orphaned_at is null
)
select day, (count(*) filter (where event_type = $5))::integer as fundings,
    coalesce(sum((payload ->> 'amount_wei')::numeric) filter (where event_type = $5), 0) as funded_wei,
    (count(*) filter (where event_type = $6))::integer as claims,
    coalesce(sum((payload ->> 'amount_eth')::numeric * $7::bigint) filter (where event_type = $6), 0) as claimed_wei
from amounts group by day
"""
