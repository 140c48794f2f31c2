-- migrate:up
-- What a webhook's flags say holds at once: nothing is claimed for one that is off or deleted. Its pending deliveries
-- follow in batches, in transactions of their own, so that nobody waits behind them at the registry lock.
--
--   flag_changes  a row for each transaction that switched a webhook on or off, or deleted it. Whoever has brought all
--                 pending deliveries of the webhook in line with its flags removes the rows that it saw when it began.
--                 While there is one, deliveries of the webhook may still be `scheduled` or `parked`.
--   health_probe  one row, which is written by every process that reports its health: a database that cannot write is
--                 not healthy. With a low fill factor, so that each write stays on its page.

create table flag_changes (
    id bigint generated always as identity primary key,
    webhook_id text not null,
    switched_on boolean not null,                               -- from off: what waits for a retry becomes due
    made_at timestamptz not null default db_now()
);
create index flag_changes_of_webhook on flag_changes (webhook_id, id);

grant insert (webhook_id, switched_on) on flag_changes to vaultevents_api;
alter table flag_changes enable row level security;
create policy own_account on flag_changes to vaultevents_api
    using (exists (select from webhooks w where w.id = webhook_id));

create table health_probe (
    singleton boolean primary key default true check (singleton),
    written_at timestamptz not null default db_now()
) with (fillfactor = 10);
insert into health_probe default values;
