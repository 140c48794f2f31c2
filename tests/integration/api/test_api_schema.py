"""The description against the service: generated requests find no 5xx, no undocumented status and no other body.

Every request is signed and stepped up, so that generated parameters and bodies reach the handlers. The environment
variable `CASES` says how many are made: 2,000 by default, in some 10 seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis.checks import CHECKS
from schemathesis.core.result import Ok
from schemathesis.core.transport import Response

from api_fixtures import Api, Customer, running_api
from store_factories import commit, funding, live_at, own_database, settlement, take
from vaultevents.api.problems import CODES
from vaultevents.store.deliveries import settle
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Case: TypeAlias = "schemathesis.Case[Any]"
CASES = int(os.environ.get("CASES", "2000"))
LIBRARY_WORDS = re.compile(r"(Input|String|List|Value|Field|Dictionary) (should|error|required)|pydantic|pattern '")
INERT = ("/resend", "/recover", "/test")
"""Where the POSTs end that change nothing of a webhook, so that they need no step-up (rule A15)."""

JUDGES = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


@dataclass(frozen=True, slots=True)
class Served:
    """An API in a thread of its own, and what belongs to its customer."""

    api: Api
    customer: Customer
    webhook_id: str
    event_id: str


@pytest.fixture(scope="module")
def served(postgres18: ServerAddress) -> Iterator[Served]:
    ready: list[Served] = []
    began, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with own_database(postgres18) as database, running_api(database, max_webhooks=10**6) as api:
            customer = await api.customer()
            body = {"url": "https://example.org/hook"}
            webhook_id = (await api.call(customer, "POST", "/v1/account/webhooks", body)).json["id"]
            outbox = await live_at(database, 0)
            await commit(outbox, *(funding(number) for number in range(5)))
            claimed = (await take(database)).deliveries
            await settle(database, [settlement(delivery) for delivery in claimed])
            ready.append(Served(api, customer, webhook_id, claimed[0].event_id))
            began.set()
            await asyncio.to_thread(ended.wait)

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            began.set()

    thread = threading.Thread(target=run)
    thread.start()
    began.wait(60)
    try:
        yield ready[0]
    finally:
        ended.set()
        thread.join(60)


def document(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(f"{served.api.url}/v1/openapi.json", timeout=10).json()
    return found


def sent(served: Served, session: requests.Session, case: Case, number: int) -> requests.Response:
    """One generated request, signed for exactly what goes over the wire; half of them name things that can be."""
    if number % 2:
        own = {"webhook_id": served.webhook_id, "event_id": served.event_id}
        case.path_parameters = {name: own.get(name, value) for name, value in (case.path_parameters or {}).items()}
        if isinstance(case.body, dict) and "url" in case.body:
            case.body["url"] = "https://example.org/generated"
    arguments = case.as_transport_kwargs(base_url=served.api.url)
    fields = ("method", "url", "headers", "params", "cookies", "data", "json")
    request = session.prepare_request(requests.Request(**{name: arguments.get(name) for name in fields}))
    body = request.body or b""
    raw = body.encode() if isinstance(body, str) else body
    assert isinstance(raw, bytes)
    customer, api = served.customer, served.api
    if case.method.upper() != "GET":
        request.headers["x-mfa-code"] = api.code(customer)
    request.headers["x-api-key"] = customer.api_key
    request.headers["authorization"] = f"Bearer {api.token(customer, request.path_url, raw)}"
    return session.send(request, timeout=20, allow_redirects=False)


def test_generated_requests_meet_only_what_is_documented(served: Served) -> None:
    schema = schemathesis.openapi.from_dict(document(served))
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    operations.sort(key=lambda operation: operation.method == "delete")  # what it deletes, the others need
    each = CASES // len(operations) + 1
    statuses: Counter[tuple[str, int]] = Counter()
    checks: list[Any] = [check for check in CHECKS.get_all() if check.__name__ in JUDGES]
    assert len(checks) == len(JUDGES)
    with requests.Session() as session:
        session.trust_env = False  # no look-up of proxies and of netrc for each request
        for operation in operations:

            @seed(20261121)
            @settings(
                max_examples=each,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def try_one(case: Case) -> None:
                answer = sent(served, session, case, statuses.total())
                statuses[f"{case.method} {case.path}", answer.status_code] += 1
                assert not LIBRARY_WORDS.search(answer.text), answer.text
                case.validate_response(Response.from_requests(answer, verify=True), checks=checks)

            try_one()
    reported = {f"{name} {status}": number for (name, status), number in sorted(statuses.items())}
    print(json.dumps({"cases": statuses.total(), "statuses": reported}, indent=1))
    assert statuses.total() >= CASES * 0.9
    assert all(status < 500 for _, status in statuses)
    reached = {name for (name, status) in statuses if status < 300}
    assert len(reached) == len(operations), "some operation never succeeded: the test proves little about it"


def test_the_document_is_openapi_3_1_and_complete(served: Served) -> None:
    found = document(served)
    assert found["openapi"].startswith("3.1")
    documented = {
        int(status) for path in found["paths"].values() for one in path.values() for status in one["responses"]
    }
    assert documented >= {status for status, _ in CODES.values()}
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            assert {"401", "404", "422", "429"} <= operation["responses"].keys(), (method, path)
            names = {parameter["name"] for parameter in operation.get("parameters", ())}
            assert ("X-MFA-Code" in names) == (method != "get" and not path.endswith(INERT))
    assert set(found["components"]["schemas"]["ProblemBody"]["properties"]["code"]["enum"]) == set(CODES)


def test_the_page_needs_nothing_from_elsewhere(served: Served) -> None:
    page = requests.get(f"{served.api.url}/docs", timeout=10)
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"<script|<link|<img|<iframe|src=|@import|https?://(?!example)", page.text, re.IGNORECASE)
    for code in CODES:
        assert f"id={code}>" in page.text
    for path in document(served)["paths"]:
        assert path in page.text
