-- The outbox: events, written once in the transaction that moves the cursor of their stream.

create table events (
    seq bigint generated always as identity primary key,
    account_id text not null references accounts,
    id text not null,
    vault_id text not null,
    event_type text not null,
    block_number bigint,
    created_at_ms bigint not null,
    encoding smallint not null,
    body bytea not null,
    suppressed boolean not null,
    filter_revision bigint not null,
    committed_xid xid8 not null default pg_current_xact_id(),
    stored_at timestamptz not null default db_now(),
    near_head boolean not null default false,
    orphaned_at timestamptz,
    unique (account_id, id)
);
create index events_feed on events (account_id, committed_xid, seq);
create index events_by_time on events (account_id, created_at_ms);
create index events_near_head on events (block_number) where near_head;
create index events_orphaned on events (orphaned_at) where orphaned_at is not null;
-- For ranges of blocks. Events arrive nearly in the order of their blocks, so ranges of pages suffice and cost an
-- insert next to nothing. Several intervals for each range, since live events lie between those of backfills.
create index events_of_blocks on events
    using brin (block_number int8_minmax_multi_ops) with (pages_per_range = 32, autosummarize = on);
comment on table events is
    'The outbox: every event, as it is delivered. A row is written once; only `orphaned_at` changes.';
comment on column events.seq is 'Internal number. Not a cursor: a later number may commit first.';
comment on column events.account_id is 'Account of the vault.';
comment on column events.id is 'Event id, a hash of what the chain says. Sent as `webhook-id`.';
comment on column events.vault_id is 'The vault.';
comment on column events.event_type is 'Event type, as in the body.';
comment on column events.block_number is 'Execution block. Null: the event has a time only (activation, exit).';
comment on column events.created_at_ms is 'When it happened on the chain: Unix time, in milliseconds.';
comment on column events.encoding is 'Version of the body''s template and of the order of its keys.';
comment on column events.body is 'Exactly the bytes that are POSTed.';
comment on column events.suppressed is 'True: stored and delivered to no webhook (see vault_spans.deliver_from).';
comment on column events.filter_revision is
    'Value of registry.filter_revision at the commit: the filters that decided.';
comment on column events.committed_xid is 'Transaction that stored it. The feed runs in this order.';
comment on column events.stored_at is 'When it was stored.';
comment on column events.near_head is 'True: first seen above the finalized block.';
comment on column events.orphaned_at is 'When its log was removed from the chain by a reorg. Null: it is on the chain.';

create table row_totals (
    id bigint generated always as identity primary key,
    counted text not null check (counted in ('events', 'deliveries')),
    difference bigint not null
);
comment on table row_totals is
    'How many events and deliveries there are, without counting them. Each statement that adds or removes rows adds a '
    'row with the difference, so the sum is exact in every snapshot and no writer waits for another. Updates cost '
    'nothing.';
comment on column row_totals.id is 'Every 64th entry replaces unlocked rows by their sum.';
comment on column row_totals.counted is 'Name of the table.';
comment on column row_totals.difference is 'Rows added, or removed if negative.';

create function count_rows() returns trigger
language plpgsql
as $$
#variable_conflict use_column
declare
    change bigint;
    entry bigint;
begin
    case tg_op
        when 'TRUNCATE' then
            select -coalesce(sum(difference), 0) from row_totals where counted = tg_table_name into change;
        when 'INSERT' then select count(*) from changed into change;
        else select -count(*) from changed into change;
    end case;
    if change = 0 then
        return null;
    end if;
    insert into row_totals (counted, difference) values (tg_table_name, change) returning id into entry;
    if entry % 64 = 0 then
        with replaced as (
            delete from row_totals where id in (select id from row_totals order by id limit 1000 for update skip locked)
            returning counted, difference
        )
        insert into row_totals (counted, difference)
            select counted, sum(difference) from replaced group by counted having sum(difference) <> 0;
    end if;
    return null;
end $$;
comment on function count_rows() is 'Trigger: add the difference of one statement to row_totals.';

create trigger count_inserted after insert on events
    referencing new table as changed for each statement execute function count_rows();
create trigger count_deleted after delete on events
    referencing old table as changed for each statement execute function count_rows();
create trigger count_truncated after truncate on events for each statement execute function count_rows();
