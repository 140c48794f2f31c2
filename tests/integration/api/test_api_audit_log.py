"""Every change that a customer makes is in the audit log, under the API key (rule T22).

The routes come from the description, so that a new one cannot be forgotten.
"""

from __future__ import annotations

from typing import Any

import pytest

from api_fixtures import running_api
from store_factories import commit, funding, live_at, rows, values
from vaultevents.store.audit_log import verify
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

WEBHOOKS = "/v1/account/webhooks"
ACTIONS: dict[tuple[str, str], tuple[str, Any]] = {
    ("post", WEBHOOKS): ("webhook.create", {"url": "https://new.example/"}),
    ("patch", f"{WEBHOOKS}/{{webhook_id}}"): ("webhook.update", {"url": "https://changed.example/"}),
    ("post", f"{WEBHOOKS}/{{webhook_id}}/recover"): ("webhook.recover", {"since": 0}),
    ("post", f"{WEBHOOKS}/{{webhook_id}}/test"): ("webhook.test", None),
    ("post", f"{WEBHOOKS}/{{webhook_id}}/rotate-secret"): ("webhook.rotate_secret", None),
    ("post", f"{WEBHOOKS}/{{webhook_id}}/deliveries/{{event_id}}/resend"): ("webhook.resend", None),
    ("delete", f"{WEBHOOKS}/{{webhook_id}}"): ("webhook.delete", None),
}
ENTRIES = "select actor, action, account_id from audit_log where seq > $1 order by seq"


async def test_every_route_that_changes_something_is_recorded(database: Database) -> None:
    async with running_api(database) as api:
        acme = await api.customer("acme")
        outbox = await live_at(database, 0)
        await commit(outbox, funding(1))
        created = await api.call(acme, "POST", WEBHOOKS, {"url": "https://a.example/"})
        await commit(outbox, funding(2))
        (event_id,) = await values(database, "select e.id from events e join deliveries d on d.event_seq = e.seq")
        ids = {"webhook_id": created.json["id"], "event_id": event_id}
        document = (await api.send("GET", "/v1/openapi.json", {})).json
        routes = [(method, path) for path, methods in document["paths"].items() for method in methods]
        changing = sorted((route for route in routes if route[0] != "get"), key=lambda route: route[0] == "delete")
        assert set(changing) == ACTIONS.keys(), "name the action of a new route"
        for method, path in changing:
            action, body = ACTIONS[method, path]
            (last,) = await values(database, "select max(seq) from audit_log")
            answer = await api.call(acme, method.upper(), path.format(**ids), body)
            assert answer.status < 300, (path, answer.body)
            entries = [tuple(row.values()) for row in await rows(database, ENTRIES, last)]
            assert entries == [(f"api:{acme.key_id}", action, "acme")], path
        (last,) = await values(database, "select max(seq) from audit_log")
        for method, path in routes:
            if method == "get":
                await api.call(acme, "GET", path.format(**ids))
        refused = await api.call(acme, "PATCH", f"{WEBHOOKS}/{ids['webhook_id']}", {"active": False}, step_up=False)
        assert refused.status >= 400
        assert await rows(database, ENTRIES, last) == [], "neither what is read nor what is refused"
        async with database.transaction() as connection:
            assert (await verify(connection)).first_bad is None
