"""Paths of the pages about one thing: ids are percent-encoded, whatever they contain."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlencode


def event_url(account_id: str, event_id: str) -> str:
    """Return the path of the page of one event."""
    return f"/events/{quote(account_id, safe='')}/{quote(event_id, safe='')}"


def webhook_url(webhook_id: str, action: str = "") -> str:
    """Return the path of the page of one webhook, or of an action on it."""
    return f"/webhooks/{quote(webhook_id, safe='')}" + (f"/{action}" if action else "")


def account_url(account_id: str) -> str:
    """Return the path of the page of one account."""
    return f"/vaults/{quote(account_id, safe='')}"


def vault_url(account_id: str, vault_id: str, action: str = "") -> str:
    """Return the path of the page of one vault, or of an action on it."""
    return f"{account_url(account_id)}/{quote(vault_id, safe='')}" + (f"/{action}" if action else "")


def with_query(path: str, values: Mapping[str, object]) -> str:
    """Append those values that are neither None nor empty."""
    given = {name: value for name, value in values.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path
