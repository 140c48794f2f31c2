"""Who gets in: links that are good once, cookies, forms, hosts and origins."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from starlette.routing import Route

from console_fixtures import Answer, Browser, ConsoleServer, running_console
from store_factories import change, rows, values
from vaultevents.config import ConsoleSettings
from vaultevents.console.access import HEADERS, Guard, Names
from vaultevents.console.app import build
from vaultevents.console.login import WRONG_CODES
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration


def is_refused(answer: Answer, status: int, words: str) -> bool:
    return answer.status == status and words in answer.words


async def test_a_link_logs_in_once(database: Database) -> None:
    async with running_console(database) as console, console.stranger() as browser, console.stranger() as other:
        code = await console.code()
        assert (await browser.get("/")).headers["location"] == "/login"
        shown = await browser.get("/login")
        assert "vaultevents console" in shown.words
        answer = await browser.post("/login", {"code": f" {console.url}/login#{code}\n"})  # the whole link, pasted
        assert (answer.status, answer.headers["location"]) == (303, "/")
        assert "Overview" in (await browser.get("/")).words
        used = await other.post("/login", {"code": code})
        assert is_refused(used, 403, "Run 'vaultevents console' again")
        assert "set-cookie" not in used.headers
        stored = await rows(
            database, "select made_by, subject from audit_log a join console_sessions s on s.id = subject"
        )
        assert [row["made_by"] for row in stored] == ["service"]  # no command has made this link
        everything = str(
            await values(
                database,
                "select t::text from console_sessions t union all select t::text from"
                " console_links t union all select t::text from audit_log t",
            )
        )
        (cookie,) = [morsel.value for morsel in browser.session.cookie_jar]
        assert cookie not in everything
        assert code not in everything


async def test_no_other_code_logs_in(database: Database) -> None:
    async with running_console(database) as console, console.stranger() as browser:
        old = await console.code()
        await change(database, "update console_links set valid_until = db_now() - interval '1 s'")
        for code in ("", "x" * 43, old):
            assert is_refused(await browser.post("/login", {"code": code}), 403, "older than 10 minutes")
        assert (await browser.get("/")).status == 303
        assert await values(database, "select id from console_sessions") == []


async def test_wrong_codes_are_limited(database: Database) -> None:
    async with running_console(database) as console, console.stranger() as browser:
        for _ in range(WRONG_CODES.burst):
            assert (await browser.post("/login", {"code": "wrong"})).status == 403
        refused = await browser.post("/login", {"code": await console.code()})
        assert is_refused(refused, 429, "Too many wrong links")
        assert 1 <= int(refused.headers["retry-after"]) <= 60


async def test_the_cookie(database: Database) -> None:
    async with running_console(database, console={"trusted_proxies": ["127.0.0.1/32"]}) as console:
        port = urlsplit(console.url).port
        async with console.stranger() as browser:
            plain = (await browser.post("/login", {"code": await console.code()})).headers["set-cookie"]
            by_tls = await browser.post(
                "/login",
                {"code": await console.code()},
                **{"X-Forwarded-Proto": "https", "Origin": console.url.replace("http:", "https:")},
            )
        name, _, rest = plain.partition("=")
        assert name == f"vaultevents_console_{port}"
        assert rest.split("; ", 1)[1] == "HttpOnly; Max-Age=43200; Path=/; SameSite=strict"
        assert by_tls.headers["set-cookie"].startswith(f"__Host-vaultevents_console_{port}=")
        assert by_tls.headers["set-cookie"].endswith("; HttpOnly; Max-Age=43200; Path=/; SameSite=strict; Secure")


async def test_every_process_knows_a_session_until_its_end(database: Database) -> None:
    async with running_console(database) as first, running_console(database) as second, first.browser() as browser:
        (cookie,) = [morsel.value for morsel in browser.session.cookie_jar]
        name = f"vaultevents_console_{urlsplit(second.url).port}"
        async with second.stranger() as other:
            elsewhere = replace(other, headers={"Cookie": f"{name}={cookie}"})
            assert (await elsewhere.get("/nodes")).status == 200
            left = await browser.submit("/logout", {})
            assert (left.status, left.headers["location"]) == (303, "/login")
            assert "vaultevents_console" in left.headers["set-cookie"]
            assert "Max-Age=0" in left.headers["set-cookie"]
            assert (await browser.get("/nodes")).status == 303
        async with running_console(database) as third, third.stranger() as late:
            name = f"vaultevents_console_{urlsplit(third.url).port}"
            assert (await replace(late, headers={"Cookie": f"{name}={cookie}"}).get("/nodes")).status == 303
        async with first.browser() as browser:
            await change(database, "update console_sessions set valid_until = db_now() - interval '1 s'")
            async with running_console(database) as third, third.stranger() as late:
                (cookie,) = [morsel.value for morsel in browser.session.cookie_jar]
                name = f"vaultevents_console_{urlsplit(third.url).port}"
                assert (await replace(late, headers={"Cookie": f"{name}={cookie}"}).get("/nodes")).status == 303


def paths(console: ConsoleServer) -> dict[str, set[str]]:
    """The routes of the console with their methods."""
    guard = build(console.context)
    assert isinstance(guard, Guard)
    found: dict[str, set[str]] = {}
    for route in guard.routes:
        assert isinstance(route, Route)
        found.setdefault(route.path, set()).update(route.methods or {"GET"})
    return found


async def test_every_route_needs_a_login_and_binds_the_browser(database: Database) -> None:
    async with running_console(database) as console, console.stranger() as stranger, console.browser() as browser:
        routes = paths(console)
        assert {"/", "/login", "/logout", "/live", "/nodes", "/static/console.css"} <= routes.keys()
        answers = []
        for path, methods in routes.items():
            is_open = path == "/login" or path.startswith("/static/")
            if "GET" in methods:
                answers.append(answer := await stranger.get(path))
                assert (answer.status == 200) == is_open, path
                assert is_open or (answer.status, answer.headers.get("location")) in ((303, "/login"), (401, None))
                assert is_open or (await stranger.get(path, **{"X-Fragment": "main"})).status == 401
                if path != "/live":  # whose answer does not end
                    answers.append(answer := await browser.get(path))
                    # of a path with a parameter, and of a form without its fields
                    assert answer.status in (200, 400 if path == "/replay/estimate" else 404), path
            if "POST" in methods and not is_open:
                answers.append(answer := await stranger.post(path, {}))
                assert is_refused(answer, 401, "not logged in"), path
                answers.append(answer := await browser.post(path, {"csrf": "0" * 64}))
                assert is_refused(answer, 403, "out of date"), path
        answers += [await browser.get("/nothing"), await browser.get("/", Host="evil.example")]
        assert [answer.status for answer in answers[-2:]] == [404, 421]
        for answer in answers:
            assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "server" not in answer.headers


HOSTS = ("evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:{port}.evil.example", "localhost:1", "[::1]")


async def test_other_hosts_are_refused(database: Database) -> None:
    """As after DNS rebinding: a site whose name leads to this address."""
    async with running_console(database) as console, console.browser() as browser:
        port = str(urlsplit(console.url).port)
        for host in HOSTS:
            for path in ("/", "/login", "/static/console.css"):
                assert is_refused(await browser.get(path, Host=host.replace("{port}", port)), 421, "not known"), host
        for known in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
            assert (await browser.get("/", Host=known)).status == 200


async def test_forms_of_other_sites_are_refused(database: Database) -> None:
    async with running_console(database) as console, console.browser() as browser, console.browser() as other:
        port = urlsplit(console.url).port
        own = (await browser.get("/configuration")).field("csrf")
        foreign = (await other.get("/configuration")).field("csrf")
        assert own != foreign
        for origin in (
            "https://evil.example",
            "null",
            "",
            f"http://127.0.0.1:{(port or 0) + 1}",
            f"https://127.0.0.1:{port}",
        ):
            answer = await browser.post("/logout", {"csrf": own}, Origin=origin)
            assert is_refused(answer, 403, "another site"), origin
            answer = await browser.post("/login", {"code": await console.code()}, Origin=origin)
            assert is_refused(answer, 403, "another site"), origin
        for site in ("cross-site", "same-site", "none"):
            answer = await browser.post("/logout", {"csrf": own}, **{"Sec-Fetch-Site": site})
            assert is_refused(answer, 403, "another site"), site
        for fields in ({}, {"csrf": ""}, {"csrf": foreign}, {"csrf": own[:-1]}):
            assert is_refused(await browser.post("/logout", fields), 403, "out of date"), fields
        assert (await browser.get("/nodes")).status == 200  # nothing was done
        assert (await browser.post("/logout", {"csrf": own})).status == 303


async def test_what_is_no_form_is_refused(database: Database) -> None:
    async with running_console(database) as console, console.browser() as browser:
        assert (await _raw(browser, "PUT", b"")).status == 405
        assert (await _raw(browser, "POST", b"{}", "application/json")).status == 415
        assert (await _raw(browser, "POST", b"a=" + b"x" * 70_000)).status == 413
        assert (await _raw(browser, "POST", b"code=%ff")).status == 400
        assert (await _raw(browser, "POST", b"&".join([b"a=1"] * 200))).status == 400


async def _raw(browser: Browser, method: str, body: bytes, kind: str = "application/x-www-form-urlencoded") -> Answer:
    headers = {"Origin": browser.url, "Content-Type": kind}
    async with browser.session.request(method, f"{browser.url}/logout", data=body, headers=headers) as answer:
        return Answer(answer.status, dict(answer.headers), await answer.text())


async def test_beyond_loopback_only_a_tls_proxy_is_served(database: Database) -> None:
    proxy = {"host": "0.0.0.0", "trusted_proxies": ["127.0.0.1/32"], "public_origin": "https://ops.example.org"}
    async with running_console(database, console=proxy) as console:
        local = console.url.replace("0.0.0.0", "127.0.0.1")
        async with replace(console, url=local).stranger() as browser:
            assert is_refused(await browser.get("/login"), 403, "not encrypted")
            by_proxy = {"X-Forwarded-Proto": "https", "Host": "ops.example.org"}
            assert (await browser.get("/login", **by_proxy)).status == 200
            answer = await browser.post(
                "/login", {"code": await console.code()}, Origin="https://ops.example.org", **by_proxy
            )
            assert answer.status == 303
            assert "Secure" in answer.headers["set-cookie"]


def test_the_names_of_a_listener() -> None:
    names = Names(ConsoleSettings(host="::1", public_origin="https://ops.example.org"))
    assert names.is_known("ops.example.org", "http", ("::1", 8421))
    assert names.is_known("[::1]:8421", "http", ("::1", 8421))
    assert names.is_known("localhost", "https", ("10.0.0.1", 443))
    assert not names.is_known("", "http", ("::1", 8421))
    assert not names.is_known("ops.example.org.evil.example", "http", ("::1", 8421))
    assert not names.is_known("localhost", "http", ("::1", 8421))
