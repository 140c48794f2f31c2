"""What a console shows in browser tests: rows of a service that has worked for a while, and hostile ones."""

from __future__ import annotations

import json
from collections.abc import Sequence

from store_factories import address, change, commit, funding, settlement, simple_simulation, take, values, webhook
from vaultevents.store.deliveries import settle
from vaultevents.store.pool import Database

EVENTS = 8


async def usual_rows(database: Database) -> None:
    """One account: a webhook that works, one that fails, one that is switched off, a node that is away."""
    outbox = await simple_simulation(database)
    healthy = await webhook(database, url="https://receiver.example/healthy")
    failing = await webhook(database, url="https://receiver.example/failing", event_types=["funding_received"])
    disabled = await webhook(database, url="https://receiver.example/disabled", vault_ids=["v1"])
    for block in range(1, EVENTS + 1):
        await commit(outbox, funding(block, block=block))
    timings = {"dns_ms": 1, "connect_ms": 3, "tls_ms": 8, "first_byte_ms": 20}
    claimed = (await take(database)).deliveries
    await settle(
        database,
        [settlement(d) if d.webhook_id == healthy.id else settlement(d, "exhausted", 503) for d in claimed],
    )
    await change(
        database,
        "update attempts set dns_ms = $1, connect_ms = $2, tls_ms = $3, first_byte_ms = $4, duration_ms = 25",
        *timings.values(),
    )
    await change(database, 'update attempts set excerpt = \'{"error": "out of service"}\' where status = 503')
    await change(
        database,
        "update webhooks set failures = 12, first_failure_at = db_now() - interval '3 hours',"
        " last_failure_at = db_now() where id = any($1)",
        [failing.id, disabled.id],
    )
    await change(database, "update webhooks set active = false, disabled_reason = 'failing' where id = $1", disabled.id)
    await _nodes(database, ["https://execution.example"], "HTTP status 503")
    await _operator_rows(database, ["the node does not have this block"])


async def hostile_rows(database: Database, texts: Sequence[str]) -> None:
    """Write each text wherever a customer, a receiver or a node chooses what a page shows."""
    # The database refuses such ids; that pages escape them does not rest on it.
    await change(database, "alter table vaults drop constraint vaults_id_check")
    await simple_simulation(database)
    numbers = list(range(1, len(texts) + 1))
    await change(database, _ACCOUNTS, numbers, texts)
    await change(database, _VAULTS, numbers, texts, [bytes(address(f"hostile {number}")) for number in numbers])
    await change(database, _SPANS)
    ids = [
        (await webhook(database, account_id=f"a-{n}", url=f"https://receiver.example/{text}", vault_ids=[text])).id
        for n, text in zip(numbers, texts, strict=True)
    ]
    bodies = [json.dumps({"vault_id": text}).encode() for text in texts]
    await change(database, _EVENTS, numbers, texts, bodies)
    await change(database, _DELIVERIES, ids)
    for statement in (_FAILED, _ANSWERED, _RESENDS, _KEYS):
        await change(database, statement)
    await _nodes(database, texts, None)
    await _operator_rows(database, texts)


_ACCOUNTS = "insert into accounts (id, name) select 'a-' || n, t from unnest($1::int[], $2::text[]) u (n, t)"
# A second one for each account, since no route has a vault id with a slash.
_VAULTS = """
insert into vaults (account_id, id, address)
select 'a-' || n, t, a from unnest($1::int[], $2::text[], $3::bytea[]) u (n, t, a)
union all select 'a-' || n, 'v-' || n, substr(sha256(a), 1, 20) from unnest($1::int[], $3::bytea[]) u (n, a)
"""
_SPANS = """
insert into vault_spans (account_id, vault_id, ordinal, first_block)
select account_id, id, 1, 0 from vaults where account_id like 'a-%'
"""
_EVENTS = """
insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
    filter_revision)
select 'a-' || n, t, t, 'funding_received', n, 1760000000000 + n, 1, b, false, 1
from unnest($1::int[], $2::text[], $3::bytea[]) u (n, t, b)
"""
_DELIVERIES = """
insert into deliveries (event_seq, webhook_id, state, attempts, finished_at)
select e.seq, w.id, 'exhausted', 2, db_now() from webhooks w join events e using (account_id) where w.id = any($1)
"""
_FAILED = """
insert into attempts (delivery_id, number, started_at, duration_ms, error, excerpt, address)
select d.id, 1, db_now(), 5, e.id, '', e.id from deliveries d join events e on e.seq = d.event_seq
"""
_ANSWERED = """
insert into attempts (delivery_id, number, started_at, duration_ms, status, excerpt, address)
select d.id, 2, db_now(), 5, 503, e.id, '127.0.0.1' from deliveries d join events e on e.seq = d.event_seq
"""
_RESENDS = """
insert into resends (webhook_id, event_seq, event_id, started_at, duration_ms, status, excerpt, finished_at)
select d.webhook_id, e.seq, e.id, db_now(), 5, 503, e.id, db_now()
from deliveries d join events e on e.seq = d.event_seq
"""
_KEYS = """
insert into api_keys (id, account_id, name, role, hash)
select 'key-' || id, id, name, 'read', sha256(convert_to(id, 'UTF8')) from accounts
"""


async def _nodes(database: Database, names: Sequence[str], problem: str | None) -> None:
    await change(
        database,
        "insert into nodes (upstream, name, state, problem, since, behind, behind_at, latency_p50_s, latency_p95_s)"
        " select 'execution', t, 'open', coalesce($2, t), db_now(), 1234, db_now(), 0.04, 12.5"
        " from unnest($1::text[]) t",
        names,
        problem,
    )


async def _operator_rows(database: Database, texts: Sequence[str]) -> None:
    """Stalled backfills, reports that failed and quarantined logs, one of each for each text."""
    await change(
        database,
        "insert into cursors (stream, kind, first, position, stop, problem, problem_since)"
        " select 'logs', 'backfill', 1, n, 100, t, db_now() from unnest($1::text[]) with ordinality u (t, n)",
        texts,
    )
    await change(database, _REPORTS, texts)
    await change(database, _QUARANTINED, texts)
    assert await values(database, "select count(*) from reports") == [len(texts)]


_REPORTS = """
insert into reports (block_number, block_time_s, tx_hash, log_index, oracle, report_timestamp, ref_slot, root, cid,
    state, attempts, next_attempt_at, problem, failure)
select n, 1760000000 + n, sha256('x'), 0, substr(sha256('x'), 1, 20), 1760000000 + n, n, sha256('x'), t,
    'pending', 3, db_now(), t, 'unavailable'
from unnest($1::text[]) with ordinality u (t, n)
"""
_QUARANTINED = """
insert into quarantined_logs (stream, block_number, block_hash, log_index, tx_hash, address, topics, data, data_bytes,
    reason)
select 'logs', n, sha256('x'), 0, sha256('x'), substr(sha256('x'), 1, 20), '', '', 0, t
from unnest($1::text[]) with ordinality u (t, n)
"""


async def hostile_event(database: Database, text: str) -> None:
    """Store one more event, with this text as its id and vault."""
    await change(database, "insert into accounts (id, name) values ('a-0', $1)", text)
    await change(database, _EVENTS, [0], [text], [b"{}"])
