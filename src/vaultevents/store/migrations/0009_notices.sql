-- migrate:up
-- What an operator must hear (decisions D7, A5), written in the transaction of the change that it tells of: none is lost
-- or invented. A notice is claimed under a lease, as a delivery is; `id` is the `webhook-id` of its POST, at every attempt.
create table notices (
    id uuid primary key default gen_random_uuid(),
    kind text not null check (kind in ('webhook_failing', 'webhook_disabled', 'delivery_exhausted', 'webhook_enabled')),
    webhook_id text not null references webhooks (id) on delete cascade,
    reason text check (reason in ('failing', 'gone')),
    count integer not null default 1 check (count > 0),         -- exhausted deliveries that were folded into it
    failures integer not null,
    failing_since timestamptz,
    created_at timestamptz not null default db_now(),
    attempts integer not null default 0,                        -- claims so far
    due_at timestamptz not null default db_now(),               -- while leased: when the lease ends
    lease uuid,
    finished_at timestamptz,
    sent boolean not null default false,                        -- accepted by the operator's webhook
    check ((reason is not null) = (kind = 'webhook_disabled'))
);

create index notices_waiting on notices (due_at) where finished_at is null;
create index notices_finished on notices (finished_at) where finished_at is not null;

-- A customer who switches a webhook on leaves a notice; the API can neither read nor change what was written.
grant insert (kind, webhook_id, reason, count, failures, failing_since) on notices to vaultevents_api;
alter table notices enable row level security;
create policy own_account on notices to vaultevents_api
    using (exists (select from webhooks w where w.id = webhook_id));
