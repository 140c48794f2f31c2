-- migrate:up
-- What became of deliveries whose rows were pruned: the exact set, so that the ledger still proves every one of them
-- (decisions D9, D14) and `recover` sends none again (D11). A set of ranges of `events.seq` takes next to nothing for a
-- webhook that receives everything, and some 20 bytes a delivery for one that receives little.
create table pruned (
    webhook_id text not null,
    chunk bigint not null,                                      -- events.seq >> 10: a row is rewritten by each batch
    state text not null check (state in ('delivered', 'cancelled')),
    recovered boolean not null,                                 -- as in deliveries
    events int8multirange not null,                             -- of events.seq
    primary key (webhook_id, chunk, state, recovered)
);

-- `recover` runs as the API, which may see what its account was sent, and change nothing of it.
grant select on pruned to vaultevents_api;
alter table pruned enable row level security;
create policy own_account on pruned to vaultevents_api
    using (exists (select from webhooks w where w.id = webhook_id));
