-- migrate:up
-- Who may call the HTTP API, what makes a request good for one change, and the wall between accounts.

-- The key under which API keys are hashed (decisions A14): random, sealed with the master key, so that the master key can
-- change and no API key has to.
create table hash_key (
    singleton boolean primary key default true check (singleton),
    key_id text not null,
    sealed bytea not null                                       -- AES-256-GCM, associated data = 'hash key'
);

create table api_keys (
    id text primary key,
    account_id text not null references accounts,
    name text not null,
    role text not null check (role in ('read', 'manage')),
    hash bytea not null unique check (octet_length(hash) = 32), -- HMAC-SHA256 under the hash key
    allowed text[] check (cardinality(allowed) > 0),            -- networks in CIDR notation; null: from anywhere
    created_at timestamptz not null default db_now(),
    revoked_at timestamptz
);
create index api_keys_of_account on api_keys (account_id);

create table api_public_keys (
    api_key_id text not null references api_keys,
    fingerprint text not null,
    der bytea not null,                                         -- SubjectPublicKeyInfo
    created_at timestamptz not null default db_now(),
    valid_until timestamptz,                                    -- null: until the API key is revoked
    primary key (api_key_id, fingerprint)
);

-- Counts the changes of the two tables above: whoever keeps them in memory asks for this number.
create table key_ring (
    singleton boolean primary key default true check (singleton),
    version bigint not null default 0
);
insert into key_ring default values;

-- Step-up (decisions A15): one TOTP factor an account.
create table mfa_factors (
    account_id text primary key references accounts,
    key_id text not null,
    sealed bytea not null,                                      -- the seed; associated data = 'mfa ' || account id
    enrolled_at timestamptz not null default db_now(),
    last_step bigint not null default 0,                        -- the newest time step that was accepted
    failures integer not null default 0,                        -- wrong codes since the last right one
    locked_until timestamptz
);

-- A token is good for one change (decisions A13). Logged like any table: a crash must not forget it.
create table used_tokens (
    digest bytea primary key check (octet_length(digest) = 32),
    account_id text not null,
    used_at timestamptz not null default db_now()
);
create index used_tokens_by_age on used_tokens (used_at);

-- Answers to creates that named an Idempotency-Key (decisions A16).
create table idempotent_answers (
    account_id text not null references accounts,
    key text not null,
    fingerprint bytea not null check (octet_length(fingerprint) = 32),  -- of the request's JSON value
    webhook_id text not null references webhooks,
    key_id text not null,
    sealed bytea,                                               -- the answer's body with its secretToken; associated
                                                                -- data = 'answer ' || webhook id; null once deleted
    created_at timestamptz not null default db_now(),
    primary key (account_id, key)
);
create index idempotent_answers_by_age on idempotent_answers (created_at);

-- The events feed runs in commit order (A19): a sequence number is no cursor, since a later number may commit first.
-- The epoch changes when events come from another server, whose transaction ids mean nothing here.
create table feed (
    singleton boolean primary key default true check (singleton),
    epoch integer not null default 1
);
insert into feed default values;
create index events_feed on events (account_id, committed_xid, seq);
create index events_by_time on events (account_id, created_at_ms);
create index deliveries_of_webhook on deliveries (webhook_id, id);
create index deliveries_by_state on deliveries (webhook_id, state, id);

-- The second wall between accounts: every statement of the API names its account, and runs besides in a role that sees the
-- rows of one account only, and that can change neither events nor keys.
do $$
begin
    if not exists (select from pg_roles where rolname = 'vaultevents_api') then
        begin
            create role vaultevents_api nologin;
        exception when duplicate_object or unique_violation then
            null;                                               -- another schema of this server was quicker
        end;
    end if;
    if not (select rolsuper from pg_roles where rolname = current_user) then
        begin
            execute format('grant vaultevents_api to %I', current_user);
        exception when insufficient_privilege then
            if not pg_has_role('vaultevents_api', 'member') then    -- an administrator may have granted it before
                raise;
            end if;
        end;
    end if;
    execute format('grant usage on schema %I to vaultevents_api', current_schema());
end $$;

grant select on accounts, vaults, vault_spans, registry, events, webhooks, webhook_revisions, deliveries, attempts,
    mfa_factors, used_tokens, idempotent_answers, feed to vaultevents_api;
grant select (webhook_id, created_at, valid_until) on webhook_secrets to vaultevents_api;
grant insert on webhooks, webhook_secrets, webhook_revisions, used_tokens, idempotent_answers to vaultevents_api;
grant update on webhooks, deliveries, idempotent_answers to vaultevents_api;
grant update (filter_revision) on registry to vaultevents_api;
grant update (last_step, failures, locked_until) on mfa_factors to vaultevents_api;
grant delete on webhook_secrets, idempotent_answers to vaultevents_api;

do $$
declare
    name text;
begin
    foreach name in array array['vaults', 'vault_spans', 'events', 'webhooks', 'webhook_revisions', 'mfa_factors',
                                'used_tokens', 'idempotent_answers'] loop
        execute format('alter table %I enable row level security', name);
        execute format($policy$create policy own_account on %I to vaultevents_api
            using (account_id = current_setting('vaultevents.account', true))$policy$, name);
    end loop;
    execute $policy$alter table accounts enable row level security$policy$;
    execute $policy$create policy own_account on accounts to vaultevents_api
        using (id = current_setting('vaultevents.account', true))$policy$;
    foreach name in array array['webhook_secrets', 'deliveries'] loop
        execute format('alter table %I enable row level security', name);
        execute format($policy$create policy own_account on %I to vaultevents_api
            using (exists (select from webhooks w where w.id = webhook_id))$policy$, name);
    end loop;
    execute $policy$alter table attempts enable row level security$policy$;
    execute $policy$create policy own_account on attempts to vaultevents_api
        using (exists (select from deliveries d where d.id = delivery_id))$policy$;
end $$;
