-- migrate:up
-- What happened on the chain, whose it is, and to whom it is sent.
--
--   network     the one network this database belongs to (decisions E10)
--   registry    one row: the version of everything registered, and the counter of filter revisions.
--               It is THE lock of decisions C9 and D9: whoever commits events locks it `for share`,
--               whoever changes accounts, vaults or webhooks locks it `for update`.
--   accounts, vaults, vault_spans       who watches which addresses, for which blocks (E9, E12)
--   cursors     how far each stream is read; a backfill or a replay has a cursor of its own (C9)
--   events      the outbox; a row is written once and never changed
--   webhooks, webhook_secrets, webhook_revisions
--   deliveries  event x webhook, one row for each that matched at fan-out (D14)
--   attempts    one POST and what came back; append-only
--
-- Lock order everywhere: registry, cursors, events, webhooks, deliveries.

-- The one clock of schedules and leases (D15); tests may replace it.
create function db_now() returns timestamptz language sql volatile as 'select clock_timestamp()';

create table network (
    singleton boolean primary key default true check (singleton),
    chain_id numeric(78) not null,
    genesis_hash bytea not null check (octet_length(genesis_hash) = 32),
    pinned_at timestamptz not null default db_now()
);

create table registry (
    singleton boolean primary key default true check (singleton),
    version bigint not null default 0,
    filter_revision bigint not null default 0
);
insert into registry default values;

create table accounts (
    id text primary key check (id ~ '^[A-Za-z0-9-]{1,64}$'),
    name text not null,
    created_at timestamptz not null default db_now()
);

create table vaults (
    account_id text not null references accounts,
    id text not null check (id ~ '^[A-Za-z0-9-]{1,64}$'),
    address bytea not null check (octet_length(address) = 20),
    queue bytea check (octet_length(queue) = 20),
    created_at timestamptz not null default db_now(),
    primary key (account_id, id),
    unique (account_id, address),
    unique (account_id, queue)
);

create table vault_spans (
    account_id text not null,
    vault_id text not null,
    ordinal integer not null,
    first_block bigint not null check (first_block >= 0),
    last_block bigint check (last_block >= first_block - 1),    -- null: still registered
    deliver_from bigint not null default 0,                     -- events of earlier blocks are sent to nobody (D13)
    primary key (account_id, vault_id, ordinal),
    foreign key (account_id, vault_id) references vaults
);
create unique index vault_spans_open on vault_spans (account_id, vault_id) where last_block is null;

create table cursors (
    id bigint generated always as identity primary key,
    stream text not null,
    kind text not null check (kind in ('live', 'backfill', 'replay')),
    first bigint not null,                                      -- where it began
    position bigint not null check (position >= first - 1),     -- the last block or epoch that is done
    anchor text,                                                -- what the next span must link to
    stop bigint check ((stop is null) = (kind = 'live')),
    updated_at timestamptz not null default db_now()
);
create unique index cursors_live on cursors (stream) where kind = 'live';

create table events (
    seq bigint generated always as identity primary key,
    account_id text not null references accounts,
    id text not null,
    vault_id text not null,
    event_type text not null,
    block_number bigint not null,
    created_at_ms bigint not null,
    encoding smallint not null,                                 -- version of templates and key order (E16)
    body bytea not null,                                        -- exactly what is posted (E11)
    quiet boolean not null,                                     -- true: stored, sent to nobody (D13)
    filter_revision bigint not null,                            -- the filters of this moment (D9)
    committed_xid xid8 not null default pg_current_xact_id(),
    stored_at timestamptz not null default db_now(),
    unique (account_id, id)
);

create table webhooks (
    id text primary key,
    account_id text not null references accounts,
    url text not null,
    event_types text[] check (cardinality(event_types) > 0),    -- null: all
    vault_ids text[] check (cardinality(vault_ids) > 0),        -- null: all
    active boolean not null,
    disabled_reason text,
    parked_until timestamptz,
    created_at timestamptz not null default db_now(),
    deleted_at timestamptz
);
create index webhooks_of_account on webhooks (account_id) where deleted_at is null;

create table webhook_secrets (
    webhook_id text not null references webhooks,
    created_at timestamptz not null default db_now(),
    key_id text not null,
    sealed bytea not null,                                      -- AES-256-GCM, associated data = webhook id (D2)
    valid_until timestamptz,
    primary key (webhook_id, created_at)
);

create table webhook_revisions (
    revision bigint primary key,
    webhook_id text not null references webhooks,
    account_id text not null,
    event_types text[],
    vault_ids text[],
    active boolean not null,                                    -- false also once deleted
    changed_at timestamptz not null default db_now()
);
create index webhook_revisions_of_webhook on webhook_revisions (webhook_id, revision);

create table deliveries (
    id bigint generated always as identity primary key,
    event_seq bigint not null references events,
    webhook_id text not null references webhooks,
    state text not null check (state in ('scheduled', 'parked', 'delivered', 'exhausted', 'cancelled')),
    attempts integer not null default 0,
    next_attempt_at timestamptz,                                -- while leased: when the lease ends
    lease uuid,
    created_at timestamptz not null default db_now(),
    finished_at timestamptz,
    unique (event_seq, webhook_id),
    check ((state = 'scheduled') <= (next_attempt_at is not null))
);
create index deliveries_due on deliveries (next_attempt_at) where state = 'scheduled';
create index deliveries_pending on deliveries (webhook_id) where state in ('scheduled', 'parked');

create table attempts (
    delivery_id bigint not null references deliveries,
    number integer not null,
    started_at timestamptz not null,
    duration_ms integer not null,
    status smallint,
    error text,
    excerpt text not null,
    address text,
    primary key (delivery_id, number)
);
