-- What is registered: the network of this database, accounts, their vaults and their webhooks.
--
-- Lock order of every transaction: registry, cursors, events, webhooks, resends, leases, deliveries, queue.
--
-- Names of columns: `…_at` is a moment of the database's clock, `…_s` and `…_ms` are seconds and milliseconds.
-- A table with the column `singleton` has exactly one row.

comment on table migrations is 'Migrations that were applied to this schema. Append-only.';
comment on column migrations.number is 'Number of the file, from 1 without a gap.';
comment on column migrations.name is 'Name of the file.';
comment on column migrations.sha256 is 'SHA-256 of the file as it was applied.';
comment on column migrations.applied_at is 'When it was applied.';

create function db_now() returns timestamptz language sql volatile as 'select clock_timestamp()';
comment on function db_now() is 'The clock of every schedule and lease. Tests replace it.';

create table network (
    singleton boolean primary key default true check (singleton),
    chain_id numeric(78) not null,
    genesis_hash bytea not null check (octet_length(genesis_hash) = 32),
    pinned_at timestamptz not null default db_now(),
    genesis_validators_root bytea check (octet_length(genesis_validators_root) = 32),
    genesis_s bigint,
    slot_ms integer,
    slots_per_epoch integer
);
comment on table network is
    'The network to which this database belongs, written at the first contact with an upstream. No row before that.';
comment on column network.singleton is 'Always true.';
comment on column network.chain_id is 'Result of eth_chainId.';
comment on column network.genesis_hash is 'Hash of execution block 0.';
comment on column network.pinned_at is 'When the network was recorded.';
comment on column network.genesis_validators_root is
    'From the Beacon API, as the columns after it. Null before the first contact with a beacon node.';
comment on column network.genesis_s is 'Unix time of slot 0, in seconds.';
comment on column network.slot_ms is 'Duration of a slot, in milliseconds.';
comment on column network.slots_per_epoch is 'Slots in an epoch.';

create table registry (
    singleton boolean primary key default true check (singleton),
    version bigint not null default 0,
    filter_revision bigint not null default 0
);
insert into registry (version) values (('x' || md5(gen_random_uuid()::text))::bit(63)::bigint);
comment on table registry is
    'The lock of everything that is registered. A transaction that commits events locks the row `for share`. A '
    'transaction that changes accounts, vaults or webhooks locks it `for update`.';
comment on column registry.singleton is 'Always true.';
comment on column registry.version is
    'Random for each change of vaults, spans or validators, so that two copies of a database never share the version of '
    'different contents.';
comment on column registry.filter_revision is 'Number of the last row of webhook_revisions.';

create table accounts (
    id text primary key check (id ~ '^[A-Za-z0-9-]{1,64}$'),
    name text not null,
    created_at timestamptz not null default db_now()
);
comment on table accounts is 'Customers. Vaults, events and webhooks belong to one account each.';
comment on column accounts.id is 'Chosen by the operator.';
comment on column accounts.name is 'Name for display.';
comment on column accounts.created_at is 'When the account was registered.';

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
comment on table vaults is 'Staking vaults that an account registered. Several accounts may register the same address.';
comment on column vaults.account_id is 'Account that registered the vault.';
comment on column vaults.id is 'Chosen by the operator; unique in the account.';
comment on column vaults.address is 'Address of the vault contract, 20 bytes.';
comment on column vaults.queue is 'Address of the withdrawal queue contract, 20 bytes. Null: none is watched.';
comment on column vaults.created_at is 'When the vault was first registered.';

create table vault_spans (
    account_id text not null,
    vault_id text not null,
    ordinal integer not null,
    first_block bigint not null check (first_block >= 0),
    last_block bigint check (last_block >= first_block - 1),
    deliver_from bigint not null default 0,
    first_time_s bigint,
    last_time_s bigint,
    quiet_time_s bigint,
    primary key (account_id, vault_id, ordinal),
    foreign key (account_id, vault_id) references vaults
);
create unique index vault_spans_open on vault_spans (account_id, vault_id) where last_block is null;
comment on table vault_spans is
    'Ranges of blocks for which a vault is registered. At most one range of a vault is open.';
comment on column vault_spans.account_id is 'Account of the vault.';
comment on column vault_spans.vault_id is 'The vault.';
comment on column vault_spans.ordinal is 'Number of the span of this vault, in order of registration.';
comment on column vault_spans.first_block is 'First execution block of the span.';
comment on column vault_spans.last_block is 'Last execution block of the span. Null: the vault is registered now.';
comment on column vault_spans.deliver_from is
    'Execution block. Events of earlier blocks are stored and delivered to no webhook.';
comment on column vault_spans.first_time_s is
    'Unix time of `first_block`, in seconds. Null until that block is final. Places events that have a time and no '
    'block.';
comment on column vault_spans.last_time_s is 'Unix time of `last_block`, in seconds. Null until that block is final.';
comment on column vault_spans.quiet_time_s is
    'Unix time of block `deliver_from` - 1, in seconds. Null until that block is final.';

create table webhooks (
    id text primary key,
    account_id text not null references accounts,
    url text not null,
    event_types text[] check (cardinality(event_types) > 0),
    vault_ids text[] check (cardinality(vault_ids) > 0),
    active boolean not null,
    disabled_reason text,
    paused_until timestamptz,
    created_at timestamptz not null default db_now(),
    deleted_at timestamptz,
    failures integer not null default 0,
    first_failure_at timestamptz,
    last_failure_at timestamptz,
    parks integer not null default 0,
    parked_until timestamptz,
    warned_at timestamptz
);
create index webhooks_of_account on webhooks (account_id) where deleted_at is null;
comment on table webhooks is 'HTTPS endpoints of accounts, their filters and the state of their health.';
comment on column webhooks.id is 'Random; stable for the life of the webhook.';
comment on column webhooks.account_id is 'Account that owns the webhook.';
comment on column webhooks.url is 'HTTPS URL to which events are POSTed.';
comment on column webhooks.event_types is 'Event types to deliver. Null: all.';
comment on column webhooks.vault_ids is 'Ids of the vaults whose events are delivered. Null: all.';
comment on column webhooks.active is 'False: switched off; nothing is delivered.';
comment on column webhooks.disabled_reason is
    'Why the service switched the webhook off. Null: its account did, or it is on.';
comment on column webhooks.paused_until is 'Until when the receiver asked for a pause with `Retry-After`.';
comment on column webhooks.created_at is 'When the webhook was created.';
comment on column webhooks.deleted_at is 'When the webhook was deleted. The row remains for the history.';
comment on column webhooks.failures is 'Failed attempts since the last success, creation or re-enabling.';
comment on column webhooks.first_failure_at is 'The first of these failures.';
comment on column webhooks.last_failure_at is 'The last of these failures.';
comment on column webhooks.parks is 'How often these failures parked the webhook.';
comment on column webhooks.parked_until is 'Until when failures park the webhook.';
comment on column webhooks.warned_at is
    'When the operator was notified that these failures may switch the webhook off.';

create table webhook_secrets (
    webhook_id text not null references webhooks,
    created_at timestamptz not null default db_now(),
    key_id text not null,
    sealed bytea not null,
    valid_until timestamptz,
    primary key (webhook_id, created_at)
);
comment on table webhook_secrets is
    'Secrets that sign the POSTs of a webhook: the newest, and the former one for an overlap.';
comment on column webhook_secrets.webhook_id is 'The webhook.';
comment on column webhook_secrets.created_at is 'When the secret was created. The newest signs first.';
comment on column webhook_secrets.key_id is 'Id of the master key that seals the secret.';
comment on column webhook_secrets.sealed is 'The secret, AES-256-GCM. Associated data: the webhook id.';
comment on column webhook_secrets.valid_until is
    'Until when a replaced secret signs beside the newest. Null: the newest.';

create table webhook_revisions (
    revision bigint primary key,
    webhook_id text not null references webhooks,
    account_id text not null,
    event_types text[],
    vault_ids text[],
    active boolean not null,
    changed_at timestamptz not null default db_now()
);
create index webhook_revisions_of_webhook on webhook_revisions (webhook_id, revision);
comment on table webhook_revisions is
    'Every filter that a webhook has had. With events.filter_revision it proves which deliveries there must be.';
comment on column webhook_revisions.revision is 'From registry.filter_revision; rises with each change of any webhook.';
comment on column webhook_revisions.webhook_id is 'The webhook.';
comment on column webhook_revisions.account_id is 'Its account.';
comment on column webhook_revisions.event_types is 'As webhooks.event_types from this revision on.';
comment on column webhook_revisions.vault_ids is 'As webhooks.vault_ids from this revision on.';
comment on column webhook_revisions.active is 'As webhooks.active from this revision on; also false once deleted.';
comment on column webhook_revisions.changed_at is 'When the change was made.';

create function replace_secret(webhook text, new_key_id text, new_sealed bytea, overlap_s double precision)
returns timestamptz language plpgsql security definer as $$
declare
    moment timestamptz := db_now();
    newest timestamptz;
begin
    if overlap_s is null or overlap_s not between 0 and 7 * 24 * 3600 then
        raise invalid_parameter_value using message = 'an overlap has 0 s to 7 days';
    end if;
    perform from webhooks w where w.id = webhook and w.deleted_at is null
        and w.account_id = current_setting('vaultevents.account', true) for update;
    if not found then
        return null;
    end if;
    select max(created_at) into newest from webhook_secrets where webhook_id = webhook;
    delete from webhook_secrets where webhook_id = webhook and (valid_until is not null or overlap_s = 0);
    update webhook_secrets set valid_until = moment + make_interval(secs => overlap_s) where webhook_id = webhook;
    -- the newest signs first, also after the clock was set back
    insert into webhook_secrets (webhook_id, key_id, sealed, created_at)
        values (webhook, new_key_id, new_sealed, greatest(moment, newest + interval '1 us'));
    return moment + make_interval(secs => overlap_s);
end $$;
do $$
begin
    -- A caller may have tables of the same names in another schema, or temporary ones.
    execute format('alter function replace_secret set search_path = %I, pg_temp', current_schema());
end $$;
revoke execute on function replace_secret from public;
comment on function replace_secret is
    'Give a webhook of the session''s account another secret. The present one stays valid for `overlap_s` seconds, at '
    'most a week; older ones are erased. Return until when the present one is valid; null: the account has no such '
    'webhook. Runs as the owner of the tables, so that the API role itself cannot keep a former secret valid.';

create table health_probe (
    singleton boolean primary key default true check (singleton),
    written_at timestamptz not null default db_now()
) with (fillfactor = 10);
insert into health_probe default values;
comment on table health_probe is
    'Written by every process that reports its health: a database that cannot write is not healthy. The low fill '
    'factor keeps each write on its page.';
comment on column health_probe.singleton is 'Always true.';
comment on column health_probe.written_at is 'The last write.';
