-- migrate:up
-- What an account asks to be sent beside the schedule (decisions D11): resends, what `recover` finds, and tests. One row is one
-- request for one attempt, and afterwards what came of it; it is never retried and counts for nothing.
--
--   deliveries.recovered    made by the outcome of a resend: the event had not matched when it committed
--
-- No foreign keys: a row is made in one statement from the webhook and the event that it names.
-- Lock order everywhere: registry, cursors, events, webhooks, resends, deliveries, queue.

create table resends (
    id bigint generated always as identity primary key,
    webhook_id text not null,
    event_seq bigint,                                           -- null: a test, which is no event
    event_id text not null,
    body bytea,                                                 -- of a test; an event has its own
    requested_at timestamptz not null default db_now(),
    due_at timestamptz not null default db_now(),               -- while leased: when the lease ends
    lease uuid,
    started_at timestamptz,
    duration_ms integer,
    status smallint,
    error text,
    excerpt text,
    address text,
    dns_ms integer,
    connect_ms integer,
    tls_ms integer,
    first_byte_ms integer,
    finished_at timestamptz,
    check ((event_seq is null) = (body is not null)),
    check ((finished_at is null) = (started_at is null))
);
create index resends_waiting on resends (webhook_id, due_at, id) where finished_at is null;
create index resends_leased on resends (webhook_id) where lease is not null;
create index resends_of_event on resends (webhook_id, event_seq);

alter table deliveries add recovered boolean not null default false;

-- The API asks, and takes back what nobody is at when a webhook is deleted. What came of it only the dispatcher writes.
grant select, insert (webhook_id, event_seq, event_id, body), delete on resends to vaultevents_api;
alter table resends enable row level security;
create policy own_account on resends to vaultevents_api
    using (exists (select from webhooks w where w.id = webhook_id));
create policy unfinished on resends as restrictive for delete to vaultevents_api
    using (finished_at is null);
