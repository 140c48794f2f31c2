"""Vaults and accounts: what is registered, validators by state, amounts by day, the last report, API keys."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vaultevents.console import fields
from vaultevents.console.charts import Column, stacked_bars, swatch
from vaultevents.console.context import ConsoleContext, in_time
from vaultevents.console.rendering import render
from vaultevents.core.units import WEI_PER_ETH, checksum, eth_text
from vaultevents.store import apikeys, cursors, vault_overview
from vaultevents.store.apikeys import ApiKey
from vaultevents.store.cursors import StreamState
from vaultevents.store.key_uses import last_uses
from vaultevents.store.vault_overview import AccountPage, AccountRow, Daily, ReportFacts, VaultPage, VaultRow

ROWS: Final = 50
EMPTY: Final = VaultPage((), None)


def routes(context: ConsoleContext) -> list[Route]:
    """Return the routes of `/vaults`, of each account below it and of each vault below its account."""

    async def overview(request: Request) -> Response:
        query = request.query_params
        accounts, vaults = await in_time(
            _read_all(
                context,
                fields.text(query, "account_after") or "",
                (fields.text(query, "in_account") or "", fields.text(query, "vault_after") or ""),
            )
        )
        return render(request, "vaults.html", accounts=accounts, vaults=vaults, checksum=checksum)

    async def account(request: Request) -> Response:
        account_id = fields.path_text(request, "account_id")
        after = fields.text(request.query_params, "vault_after") or ""
        found = await in_time(_read_account(context, account_id, after))
        if found is None:
            raise HTTPException(404)
        row, vaults = found
        keys: Sequence[ApiKey] = await in_time(apikeys.list_keys(context.database, account_id))
        used = await in_time(last_uses(context.database, account_id))
        return render(request, "account.html", account=row, vaults=vaults, keys=keys, used=used, checksum=checksum)

    async def vault(request: Request) -> Response:
        account_id, vault_id = (fields.path_text(request, name) for name in ("account_id", "vault_id"))
        found = await in_time(_read_vault(context, account_id, vault_id))
        if found is None:
            raise HTTPException(404)
        row, daily, report, streams, now = found
        return render(
            request,
            "vault.html",
            vault=row,
            days=daily.days,
            chart=_chart(daily),
            swatch=swatch,
            happened=[day for day in reversed(daily.days) if day.fundings or day.claims],
            since=daily.since,
            report=report,
            streams=streams,
            done=request.query_params.get("done") == "backfill",
            now=now,
            checksum=checksum,
            eth_text=eth_text,
        )

    return [
        Route("/vaults", overview),
        Route("/vaults/{account_id}", account),
        Route("/vaults/{account_id}/{vault_id}", vault),
    ]


async def _read_all(
    context: ConsoleContext, account_after: str, vault_after: tuple[str, str]
) -> tuple[AccountPage, VaultPage]:
    async with context.database.transaction() as connection:
        accounts = await vault_overview.accounts(connection, account_after, ROWS)
        return accounts, await vault_overview.vaults(connection, None, vault_after, ROWS)


async def _read_account(context: ConsoleContext, account_id: str, after: str) -> tuple[AccountRow, VaultPage] | None:
    async with context.database.transaction() as connection:
        row = await vault_overview.account(connection, account_id)
        if row is None:
            return None
        return row, await vault_overview.vaults(connection, account_id, (account_id, after), ROWS)


async def _read_vault(
    context: ConsoleContext, account_id: str, vault_id: str
) -> tuple[VaultRow, Daily, ReportFacts | None, list[StreamState], datetime] | None:
    now = await context.database.now()
    async with context.database.transaction() as connection:
        row = await vault_overview.vault(connection, account_id, vault_id)
        if row is None:
            return None
        daily = await vault_overview.daily(connection, account_id, vault_id, now)
        report = await vault_overview.last_report(connection, account_id, vault_id)
        return row, daily, report, await cursors.states(connection), now


def _chart(daily: Daily) -> Markup:
    """Draw what was funded and claimed on each day."""
    columns = [
        Column(str(day.day), {"funded": day.funded_wei / WEI_PER_ETH, "claimed": day.claimed_wei / WEI_PER_ETH})
        for day in daily.days
    ]
    label = f"Funded and claimed on the last {len(daily.days)} days; the numbers are in the table below"
    return stacked_bars(columns, ("funded", "claimed"), label)
