-- migrate:up
-- The beacon chain: its identity, the validators that pay to registered vaults, and the times of spans.

-- Pinned at first contact with a beacon node (decisions E10); null until then.
alter table network
    add genesis_validators_root bytea check (octet_length(genesis_validators_root) = 32),
    add genesis_s bigint,
    add slot_ms integer,
    add slots_per_epoch integer;

-- Activations and exits happen at the start of an epoch, which no block carries.
alter table events alter block_number drop not null;

-- The times of a span's first and last block and of the last quiet one (`deliver_from` - 1), known once these blocks are
-- final: what has only a time is placed by them (E12, D13).
alter table vault_spans
    add first_time_s bigint,
    add last_time_s bigint,
    add quiet_time_s bigint;

-- Why a stream does not move, in the words of the log; null while it does.
alter table cursors
    add problem text,
    add problem_since timestamptz;

create table validators (
    index bigint primary key,
    pubkey bytea not null check (octet_length(pubkey) = 48),
    credentials bytea not null check (octet_length(credentials) = 32),
    activation_epoch bigint,                                    -- null: not assigned yet; written once
    exit_epoch bigint,                                          -- likewise
    found_at timestamptz not null default db_now()
);

-- What discovery has done (C5). `known_through` is the epoch of the finalized block's slot as of the last refresh:
-- every activation and exit up to four epochs later is in `validators` (C4).
create table discovery (
    singleton boolean primary key default true check (singleton),
    registry_size bigint not null default 0,                    -- validators of the whole network that were looked at
    known_through bigint,                                       -- null: never refreshed
    scanned_at timestamptz,
    scanned_vaults bytea[] not null default '{}',
    problem text                                                -- what keeps it, and with it the streams, for now
);
insert into discovery default values;
