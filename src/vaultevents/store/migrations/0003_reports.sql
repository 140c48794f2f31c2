-- migrate:up
-- Published oracle reports (decisions C6). The log commits first, with the cursor of the stream `reports`; its file is
-- fetched, verified and turned into events apart from it, for as long as it takes.
create table reports (
    id bigint generated always as identity primary key,
    block_number bigint not null,
    block_time_s bigint not null,
    tx_hash bytea not null check (octet_length(tx_hash) = 32),
    log_index integer not null,
    oracle bytea not null check (octet_length(oracle) = 20),
    report_timestamp numeric(78) not null,
    ref_slot numeric(78) not null,
    root bytea not null check (octet_length(root) = 32),
    cid text not null,
    state text not null check (state in ('pending', 'resolved', 'empty', 'given_up')),
    vaults integer,                                             -- leaves in its tree, once verified
    attempts integer not null default 0,                        -- since it is pending
    next_attempt_at timestamptz,
    problem text,                                               -- why the last attempt failed
    seen_at timestamptz not null default db_now(),
    resolved_at timestamptz,
    unique (block_number, log_index),
    check ((state = 'pending') = (next_attempt_at is not null))
);
create index reports_due on reports (next_attempt_at) where state = 'pending';
