-- migrate:up
-- Logs of watched addresses that cannot be decoded (decisions C8): they are kept here, in the transaction that moves the
-- cursor of their stream over them, and the stream goes on.
--
--   quarantined_logs       at most 100 for each address in a block are kept one by one; `more` of the last of them counts
--                          the others. `data` is cut at 4096 bytes: the chain has the rest. `open`: no event was made of
--                          it. `resolved`: its block was read again and it could be decoded. `dismissed`: an operator
--                          has given it up. A reorganisation removes those of the blocks that are gone.
--   quarantined_addresses  when there was last a notice of an address, and how many logs have come since
--   notices                `logs_quarantined` has an address and a block instead of a webhook
--
-- Which accounts a log concerns is derived from the registry.
create table quarantined_logs (
    id bigint generated always as identity primary key,
    stream text not null,
    block_number bigint not null check (block_number >= 0),
    block_hash bytea not null check (octet_length(block_hash) = 32),
    log_index integer not null,
    tx_hash bytea not null check (octet_length(tx_hash) = 32),
    address bytea not null check (octet_length(address) = 20),
    topics bytea not null check (octet_length(topics) % 32 = 0),    -- one after the other
    data bytea not null check (octet_length(data) <= 4096),
    data_bytes integer not null,                                    -- before it was cut
    reason text not null,
    more integer not null default 0,
    state text not null default 'open' check (state in ('open', 'resolved', 'dismissed')),
    dismissed_because text,
    first_seen_at timestamptz not null default db_now(),
    changed_at timestamptz,                                         -- when it was resolved or dismissed
    unique (stream, block_number, log_index),
    check (state <> 'dismissed' or dismissed_because is not null)
);
create index quarantined_open on quarantined_logs (block_number, stream) include (more) where state = 'open';
create index quarantined_by_address on quarantined_logs (address, id);
create index quarantined_by_state on quarantined_logs (state, id);

create table quarantined_addresses (
    address bytea primary key check (octet_length(address) = 20),
    unnoticed bigint not null default 0,
    noticed_at timestamptz
);

alter table notices
    alter webhook_id drop not null,
    add address bytea check (octet_length(address) = 20),
    add block_number bigint,
    drop constraint notices_kind_check,
    add constraint notices_kind_check check (
        kind in ('webhook_failing', 'webhook_disabled', 'delivery_exhausted', 'webhook_enabled', 'logs_quarantined')),
    add constraint notices_about_check check (
        (webhook_id is null) = (kind = 'logs_quarantined')
        and (address is not null) = (kind = 'logs_quarantined')
        and (block_number is not null) = (kind = 'logs_quarantined'));
