"""Webhooks through the API: what existing clients send, and what they get (interface §2.1, §4; A1–A5)."""

from __future__ import annotations

import pytest

from api_worlds import running_api
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration


async def test_a_webhook_lives_and_dies(database: Database) -> None:
    async with running_api(database) as api:
        acme = await api.customer()
        answer = await api.call(acme, "GET", "/v1/account")
        assert answer.status == 200, answer.body
        print(answer.json)
        created = await api.call(acme, "POST", "/v1/account/webhooks", {"url": "https://example.org/hook"})
        assert created.status == 201, created.body
        print(created.json, created.headers)
        listed = await api.call(acme, "GET", "/v1/account/webhooks")
        print(listed.json)
        wid = created.json["id"]
        p = await api.call(acme, "PATCH", f"/v1/account/webhooks/{wid}", {"active": False})
        print(p.status, p.json)
        for path in ("", "/health", "/deliveries", "/deliveries/x"):
            p = await api.call(acme, "GET", f"/v1/account/webhooks/{wid}{path}")
            print(path, p.status, p.json)
        for path in ("events", "events/x", "vaults", "nothing"):
            p = await api.call(acme, "GET", f"/v1/account/{path}")
            print(path, p.status, p.json)
        d = await api.call(acme, "DELETE", f"/v1/account/webhooks/{wid}")
        print(d.status, d.body, d.headers)
        r = await api.send("GET", "/v1/openapi.json", {})
        print(r.status, len(r.body))
        r = await api.send("GET", "/docs", {})
        print(r.status, len(r.body))
        for bad in (
            [],
            {},
            {"url": "http://x"},
            {"url": "https://example.org", "x": 1, "eventTypes": [], "stakingVaultIds": ["v2"]},
            {"url": "https://example.org", "stakingVaultIds": ["v1", "zz"]},
        ):
            r = await api.call(acme, "POST", "/v1/account/webhooks", bad)
            print(r.status, r.json)
