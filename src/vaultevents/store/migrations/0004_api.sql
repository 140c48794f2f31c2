-- The HTTP API: keys, one-time codes, idempotency, the feed, and what the role of the API may read and change.

create table hash_key (
    singleton boolean primary key default true check (singleton),
    key_id text not null,
    sealed bytea not null
);
comment on table hash_key is
    'The random key under which API keys are hashed. It is sealed, so that the master key can change and no API key '
    'has to.';
comment on column hash_key.singleton is 'Always true.';
comment on column hash_key.key_id is 'Id of the master key that seals it.';
comment on column hash_key.sealed is 'The key, AES-256-GCM. Associated data: ''hash key''.';

create table api_keys (
    id text primary key,
    account_id text not null references accounts,
    name text not null,
    role text not null check (role in ('read', 'manage')),
    hash bytea not null unique check (octet_length(hash) = 32),
    allowed text[] check (cardinality(allowed) > 0),
    created_at timestamptz not null default db_now(),
    revoked_at timestamptz
);
create index api_keys_of_account on api_keys (account_id);
comment on table api_keys is 'Keys of the HTTP API.';
comment on column api_keys.id is 'Public id.';
comment on column api_keys.account_id is 'Account for which it is valid.';
comment on column api_keys.name is 'Name for display.';
comment on column api_keys.role is '`read`, or `manage`: may also change webhooks.';
comment on column api_keys.hash is 'HMAC-SHA256 of the key under hash_key, 32 bytes.';
comment on column api_keys.allowed is 'Networks in CIDR notation from which it may be used. Null: any.';
comment on column api_keys.created_at is 'When it was created.';
comment on column api_keys.revoked_at is 'When it was revoked. Null: valid.';

create table api_public_keys (
    api_key_id text not null references api_keys,
    fingerprint text not null,
    der bytea not null,
    created_at timestamptz not null default db_now(),
    valid_until timestamptz,
    primary key (api_key_id, fingerprint)
);
comment on table api_public_keys is 'Public keys that verify the JWTs of an API key.';
comment on column api_public_keys.api_key_id is 'The API key.';
comment on column api_public_keys.fingerprint is '`SHA256:` and the digest of `der` in unpadded base64.';
comment on column api_public_keys.der is 'SubjectPublicKeyInfo, DER.';
comment on column api_public_keys.created_at is 'When it was added.';
comment on column api_public_keys.valid_until is 'Null: until the API key is revoked.';

create table key_ring (
    singleton boolean primary key default true check (singleton),
    version bigint not null default 0
);
insert into key_ring (version) values (('x' || md5(gen_random_uuid()::text))::bit(63)::bigint);
comment on table key_ring is 'Version of api_keys and api_public_keys, for processes that cache them.';
comment on column key_ring.singleton is 'Always true.';
comment on column key_ring.version is 'Random for each change, as registry.version.';

create table mfa_factors (
    account_id text primary key references accounts,
    key_id text not null,
    sealed bytea not null,
    enrolled_at timestamptz not null default db_now(),
    last_step bigint not null default 0,
    failures integer not null default 0,
    locked_until timestamptz
);
comment on table mfa_factors is 'Step-up authentication: one TOTP factor an account.';
comment on column mfa_factors.account_id is 'The account.';
comment on column mfa_factors.key_id is 'Id of the master key that seals the seed.';
comment on column mfa_factors.sealed is 'The TOTP seed, AES-256-GCM. Associated data: ''mfa '' || account id.';
comment on column mfa_factors.enrolled_at is 'When it was enrolled.';
comment on column mfa_factors.last_step is 'Newest TOTP time step that was accepted. It and earlier ones are refused.';
comment on column mfa_factors.failures is 'Wrong codes since the last correct one.';
comment on column mfa_factors.locked_until is
    'Until when no code is accepted. Null: never locked since the last correct code.';

create table used_tokens (
    digest bytea primary key check (octet_length(digest) = 32),
    account_id text not null,
    used_at timestamptz not null default db_now()
);
create index used_tokens_by_age on used_tokens (used_at);
comment on table used_tokens is
    'JWTs that authorized a change: each is accepted once. Logged, so that it survives a crash.';
comment on column used_tokens.digest is 'SHA-256 of the API key''s id and the signing input of the token.';
comment on column used_tokens.account_id is 'Account of the token.';
comment on column used_tokens.used_at is 'When it was used.';

create table idempotent_answers (
    account_id text not null references accounts,
    key text not null,
    fingerprint bytea not null check (octet_length(fingerprint) = 32),
    webhook_id text not null references webhooks,
    key_id text not null,
    sealed bytea,
    created_at timestamptz not null default db_now(),
    primary key (account_id, key)
);
create index idempotent_answers_by_age on idempotent_answers (created_at);
comment on table idempotent_answers is 'Answers to POST requests with an Idempotency-Key that created a webhook.';
comment on column idempotent_answers.account_id is 'The account.';
comment on column idempotent_answers.key is 'Idempotency-Key of the request.';
comment on column idempotent_answers.fingerprint is 'SHA-256 of the JSON value of the request.';
comment on column idempotent_answers.webhook_id is 'The webhook that was created.';
comment on column idempotent_answers.key_id is 'Id of the master key that seals the answer.';
comment on column idempotent_answers.sealed is
    'Body of the answer with its secretToken, AES-256-GCM. Associated data: ''answer '' || webhook id. Null: deleted.';
comment on column idempotent_answers.created_at is 'When the request was answered.';

create table feed (
    singleton boolean primary key default true check (singleton),
    epoch integer not null default 1
);
insert into feed default values;
comment on table feed is 'The events feed runs in the order of events.committed_xid.';
comment on column feed.singleton is 'Always true.';
comment on column feed.epoch is 'Rises when events come from another server, whose transaction ids mean nothing here.';

-- The role of the API. Every statement of the API names its account, and runs besides in this role, which sees the rows
-- of one account only (the setting `vaultevents.account`) and can change neither events nor keys.

do $$
begin
    if not exists (select from pg_roles where rolname = 'vaultevents_api') then
        begin
            create role vaultevents_api nologin;
        exception when duplicate_object or unique_violation then
            null;  -- another schema of this server created it meanwhile
        end;
    end if;
    if not (select rolsuper from pg_roles where rolname = current_user) then
        begin
            execute format('grant vaultevents_api to %I', current_user);
        exception when insufficient_privilege then
            if not pg_has_role('vaultevents_api', 'member') then  -- an administrator may have granted it before
                raise;
            end if;
        end;
    end if;
    execute format('grant usage on schema %I to vaultevents_api', current_schema());
end $$;

grant select on accounts, vaults, vault_spans, registry, events, feed, webhooks, webhook_revisions, deliveries,
    attempts, pruned, queue, leases, resends, mfa_factors, used_tokens, idempotent_answers to vaultevents_api;
grant select (webhook_id, created_at, valid_until) on webhook_secrets to vaultevents_api;

-- Webhooks and what follows from changing them.
grant update (filter_revision) on registry to vaultevents_api;
grant insert, update on webhooks to vaultevents_api;
grant insert on webhook_revisions to vaultevents_api;
grant insert, delete on webhook_secrets to vaultevents_api;
grant execute on function replace_secret to vaultevents_api;
grant update on deliveries to vaultevents_api;
grant insert, delete on queue to vaultevents_api;
grant insert (webhook_id, switched_on) on flag_changes to vaultevents_api;
grant insert (kind, webhook_id, reason, count, failures, failing_since) on notices to vaultevents_api;

-- Resends: the API requests them, and removes those that are not started when a webhook is deleted. The dispatcher
-- writes the results.
grant insert (webhook_id, event_seq, event_id, body), delete on resends to vaultevents_api;

-- Authorization of changes.
grant update (last_step, failures, locked_until) on mfa_factors to vaultevents_api;
grant insert on used_tokens to vaultevents_api;
grant insert, update, delete on idempotent_answers to vaultevents_api;

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
    foreach name in array array['webhook_secrets', 'deliveries', 'pruned', 'queue', 'leases', 'flag_changes', 'resends',
                                'notices'] loop
        execute format('alter table %I enable row level security', name);
        execute format($policy$create policy own_account on %I to vaultevents_api
            using (exists (select from webhooks w where w.id = webhook_id))$policy$, name);
    end loop;
end $$;

alter table accounts enable row level security;
create policy own_account on accounts to vaultevents_api
    using (id = current_setting('vaultevents.account', true));
alter table attempts enable row level security;
create policy own_account on attempts to vaultevents_api
    using (exists (select from deliveries d where d.id = delivery_id));
create policy unfinished on resends as restrictive for delete to vaultevents_api
    using (finished_at is null);
alter table due_webhooks enable row level security;  -- no policy: nothing for the role of the API
