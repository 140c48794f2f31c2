"""What the benchmarks of delivery share: a database full of work, the floor, and a dispatcher to measure.

The floor is a bare loop of a lean client on uvloop protocols: 64 kept connections, each posting a signed body once
the answer to the one before is there. No queue, no database, no vetting.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, cast

import uvloop
from _machine import cpu_s, postgres_cpu_s
from yarl import URL

from vaultevents import __version__
from vaultevents.core.sealing import MasterKey, Secret
from vaultevents.core.signing import delivery_headers, new_secret, sign
from vaultevents.core.webhooks import UrlRules, Webhook, parse_allow
from vaultevents.dispatch.sender import Reply, Sender
from vaultevents.egress import Guard
from vaultevents.store import accounts, webhooks
from vaultevents.store.pool import Connection, Database, open_database
from vaultevents.store.postgres.embedded import EmbeddedPostgres

BENCH = Path(__file__).parent
KEY = MasterKey(bytes(range(32)))
CONNECTIONS = 64
PREPARATION_S = 600.0
LOOK_S = 0.25  # how often it is asked whether all is done: that costs the database, too
BODY = json.dumps({"id": "x" * 90, "event_type": "funding_received", "payload": "y" * 500}).encode()


class PlainGuard(Guard):
    """Lets a benchmark post without TLS; the product never does (rule D10)."""

    def vet(self, url: str) -> URL:
        return URL(url, encoded=True)


@dataclass
class BenchSetup:
    """One database in `folder` and one receiver."""

    folder: Path
    scheme: str
    facts: dict[str, Any] = field(default_factory=dict)
    port: int = 0

    def url(self, path: str) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}{path}"

    @asynccontextmanager
    async def database(self) -> AsyncIterator[Database]:
        opened = await open_database(self.facts["database"], schema=self.facts["schema"])
        try:
            yield opened
        finally:
            await opened.close()

    def postgres_cpu_s(self) -> float:
        return postgres_cpu_s(self.folder)


@contextmanager
def bench_setup(folder: Path, scheme: str) -> Iterator[BenchSetup]:
    """A fresh embedded PostgreSQL, and a receiver in a process of its own."""
    made = BenchSetup(folder, scheme)
    embedded = EmbeddedPostgres(folder / "postgres")
    address = embedded.join()
    made.facts = {
        "database": address.connect_kwargs(),
        "schema": f"b_{os.getpid()}",
        "scheme": scheme,
        "ca_file": str(folder / "ca.pem"),
        "options": {},
    }
    try:
        with receiving(scheme, folder) as made.port:
            yield made
    finally:
        embedded.leave()


@contextmanager
def receiving(scheme: str, folder: Path, script: str = "_receiver.py") -> Iterator[int]:
    """The port of a receiver in a process of its own."""
    command = [sys.executable, str(BENCH / script), scheme, str(folder)]
    receiver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert receiver.stdout is not None
        port: int = json.loads(receiver.stdout.readline())["port"]
        yield port
    finally:
        receiver.kill()
        receiver.wait()


async def add_webhooks(database: Database, urls: list[str], account_id: str = "acme", *, first: int = 0) -> list[str]:
    """Webhooks of an account that is made with them, numbered from `first` on; their ids."""
    await accounts.add_account(database, account_id, account_id)
    ids = []
    for number, url in enumerate(urls, first):
        webhook = Webhook(f"wh_{number:08d}", account_id, url, None, None, active=True)
        secret = Secret(new_secret(os.urandom(32)))
        await webhooks.create_webhook(database, webhook, secret, KEY, os.urandom(12))
        ids.append(webhook.id)
    return ids


@asynccontextmanager
async def without_limit(database: Database) -> AsyncIterator[Connection]:
    """A connection outside transactions on which the server lets statements of a preparation take their time."""
    async with database.statement() as connection:
        limit = await connection.fetchval("show statement_timeout")
        await connection.execute("set statement_timeout = 0")
        yield connection
        await connection.execute("select set_config('statement_timeout', $1, false)", limit)


async def add_deliveries(database: Database, count: int, webhook_ids: list[str], account_id: str = "acme") -> None:
    """`count` due deliveries, of an event each, to the webhooks in turn; as fan-out leaves them."""
    async with without_limit(database) as connection:
        await connection.execute(_DELIVERIES, account_id, count, webhook_ids, BODY, timeout=PREPARATION_S)
        await connection.execute("vacuum analyze", timeout=PREPARATION_S)
        await connection.execute("checkpoint", timeout=PREPARATION_S)


_DELIVERIES = """
with happened as (
    insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
        filter_revision)
    select $1, 'funding_received_acme_' || gen_random_uuid() || n, 'v1', 'funding_received', n, n, 1, $4, false, 1
    from generate_series(1, $2::integer) as n returning seq
), made as (
    insert into deliveries (event_seq, webhook_id, state)
    select seq, ($3::text[])[1 + seq % cardinality($3::text[])], 'scheduled' from happened
    returning id, event_seq, webhook_id
)
insert into queue (delivery_id, event_seq, webhook_id, due_at)
select id, event_seq, webhook_id, db_now() from made
"""


@contextmanager
def dispatching(made: BenchSetup, number: int = 1, **options: Any) -> Iterator[list[int]]:
    """Dispatchers in processes of their own, ready to claim; their pids. They end with the block, drained."""
    made.facts["options"] = options
    made.folder.joinpath("facts.json").write_text(json.dumps(made.facts))
    command = [sys.executable, str(BENCH / "_dispatching.py"), str(made.folder)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(number)]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit("the dispatcher did not start")
        yield [process.pid for process in processes]
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def until_done(database: Database, begin: datetime, limit_s: float = 60.0) -> float:
    """Seconds from `begin` of the database's clock until the last delivery was settled."""
    for _ in range(round(limit_s / LOOK_S)):
        await asyncio.sleep(LOOK_S)
        async with database.statement() as connection:
            if not await connection.fetchval("select exists (select from queue)"):
                end: datetime = await connection.fetchval("select max(finished_at) from deliveries")
                return (end - begin).total_seconds()
    raise SystemExit(f"not delivered within {limit_s:g} s")


async def deliver(
    made: BenchSetup, count: int, webhook_ids: list[str], number: int = 1, **options: Any
) -> dict[str, float]:
    """Lays down the work, lets a fresh dispatcher do it, and measures from its first claim to the last settle."""
    async with made.database() as database:
        await add_deliveries(database, count, webhook_ids)
        postgres = made.postgres_cpu_s()
        with dispatching(made, number, **options) as pids:
            begin, cpu = await database.now(), sum(map(cpu_s, pids))
            seconds = await until_done(database, begin)
            process_us = (sum(map(cpu_s, pids)) - cpu) * 1e6 / count
        postgres_us = (made.postgres_cpu_s() - postgres) * 1e6 / count
        async with database.statement() as connection:
            done = await connection.fetchval(
                "select count(*) from deliveries d join attempts a on a.delivery_id = d.id"
                " where d.state = 'delivered' and a.status = 200"
            )
            await connection.execute("truncate attempts, deliveries, queue, events cascade")
        if done != count:
            raise SystemExit(f"{done} of {count} deliveries have an accepted attempt")
    return {"deliveries_s": count / seconds, "process_cpu_us": process_us, "postgres_cpu_us": postgres_us}


class _Poster(asyncio.Protocol):
    """One connection of the floor."""

    def __init__(self, posts: Iterator[int], done: asyncio.Future[None], secret: str, head: bytes) -> None:
        self._posts = posts
        self._done = done
        self._secret = secret
        self._head = head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._post()

    def _post(self) -> None:
        number = next(self._posts, None)
        if number is None:
            self._transport.close()
            return
        name, now_s = f"funding_received_acme_{number}", int(time.time())
        signature = sign([self._secret], name, now_s, BODY)
        self._transport.write(
            b"%swebhook-id: %s\r\nwebhook-timestamp: %d\r\nwebhook-signature: %s\r\n\r\n%s"
            % (self._head, name.encode(), now_s, signature.encode(), BODY)
        )

    def data_received(self, data: bytes) -> None:
        if not data.startswith(b"HTTP/1.1 200 ") or not data.endswith(b"\r\n\r\nok"):
            self._done.set_exception(SystemExit(f"not answered: {data!r}"))
            return
        self._post()

    def connection_lost(self, problem: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def _post_all(made: BenchSetup, count: int, path: str, connections: int) -> None:
    loop = asyncio.get_running_loop()
    context = None
    if made.scheme == "https":
        context = ssl.create_default_context(cafile=made.facts["ca_file"])
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{made.port}\r\ncontent-type: application/json\r\n"
        f"user-agent: vaultevents/{__version__}\r\nx-vaultevents-attempt: 1\r\ncontent-length: {len(BODY)}\r\n"
    ).encode()
    secret = "whsec_" + base64.b64encode(bytes(32)).decode()
    posts = iter(range(count))
    ends = [loop.create_future() for _ in range(connections)]
    for end in ends:
        await loop.create_connection(
            lambda end=end: _Poster(posts, end, secret, head), "127.0.0.1", made.port, ssl=context
        )
    await asyncio.gather(*ends)


def floor(made: BenchSetup, count: int, path: str = "/hook", connections: int = CONNECTIONS) -> dict[str, float]:
    """The bare loop: its rate and its CPU time for each POST."""
    begin, cpu = time.perf_counter(), time.process_time()
    uvloop.run(_post_all(made, count, path, connections))
    seconds = time.perf_counter() - begin
    return {"posts_s": count / seconds, "process_cpu_us": (time.process_time() - cpu) * 1e6 / count}


async def _send_all(made: BenchSetup, count: int) -> None:
    rules = UrlRules(allow=(parse_allow("127.0.0.1:*"),))
    guard, ca_file = (
        (Guard(rules), Path(made.facts["ca_file"])) if made.scheme == "https" else (PlainGuard(rules), None)
    )
    url, secrets = made.url("/hook"), ["whsec_" + base64.b64encode(bytes(32)).decode()]
    left, done = iter(range(count)), asyncio.Event()
    dialling: list[asyncio.Task[None]] = []
    answered = 0

    def headers(number: int) -> dict[str, str]:
        return delivery_headers(
            secret_texts=secrets,
            webhook_id=f"funding_received_acme_{number}",
            timestamp_s=int(time.time()),
            body=BODY,
            attempt_number=1,
            version=__version__,
        )

    def on_reply(reply: Reply) -> None:
        nonlocal answered
        if reply.status != 200:
            raise SystemExit(f"not answered: {reply}")
        answered += 1
        number = next(left, None)
        if number is not None and not sender.try_post(url, BODY, headers(number), on_reply):
            dialling.append(asyncio.create_task(begin(number)))
        elif answered == count:
            done.set()

    async def begin(number: int) -> None:
        on_reply(await sender.send(url, BODY, headers(number)))

    async with Sender(guard, ca_file=ca_file) as sender:
        await asyncio.gather(*(begin(number) for number in islice(left, CONNECTIONS)))
        await done.wait()


def client(made: BenchSetup, count: int) -> dict[str, float]:
    """As `floor`, but by the product's own client: what vetting, parsing, limits and replies cost."""
    begin, cpu = time.perf_counter(), time.process_time()
    uvloop.run(_send_all(made, count))
    seconds = time.perf_counter() - begin
    return {"client_posts_s": count / seconds, "client_cpu_us": (time.process_time() - cpu) * 1e6 / count}
