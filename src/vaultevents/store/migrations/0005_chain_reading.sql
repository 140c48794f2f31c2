-- Reading the chain: positions of streams, nodes, validators, oracle reports and quarantined logs.

create table cursors (
    id bigint generated always as identity primary key,
    stream text not null,
    kind text not null check (kind in ('live', 'backfill', 'replay', 'audit')),
    first bigint not null,
    position bigint not null check (position >= first - 1),
    anchor text,
    stop bigint,
    updated_at timestamptz not null default db_now(),
    problem text,
    problem_since timestamptz,
    rewinds bigint not null default 0,
    rewound_at timestamptz,
    node text,
    unverified_from bigint,
    constraint cursors_stop_check check ((stop is null) = (kind in ('live', 'audit'))),
    constraint cursors_node_check check (node is null or kind = 'audit')
);
create unique index cursors_live on cursors (stream) where kind = 'live';
create unique index cursors_audit on cursors (stream, node) nulls not distinct where kind = 'audit';
comment on table cursors is
    'How far each stream is read. Position and events are written in one transaction. Backfills, replays and audits '
    'have cursors of their own.';
comment on column cursors.id is 'Internal number.';
comment on column cursors.stream is 'Name of the stream. Its unit is a block or an epoch.';
comment on column cursors.kind is
    '`live`: follows the chain. `backfill`, `replay`: a range that ends. `audit`: reads again what was read, one node '
    'at a time.';
comment on column cursors.first is 'First block or epoch.';
comment on column cursors.position is 'Last block or epoch that is done.';
comment on column cursors.anchor is 'Hash to which the next span must link. Null: none.';
comment on column cursors.stop is 'Last block or epoch to read. Null: without an end.';
comment on column cursors.updated_at is 'When the cursor last moved.';
comment on column cursors.problem is 'Why the stream does not move, as in the log. Null: it moves.';
comment on column cursors.problem_since is 'Since when there is a problem.';
comment on column cursors.rewinds is 'How often a reorg moved the cursor back.';
comment on column cursors.rewound_at is 'When a reorg last moved it back.';
comment on column cursors.node is 'Redacted name of the execution node that an audit asks. Null: no particular node.';
comment on column cursors.unverified_from is
    'First block of a row whose headers or receipts have a form that this version does not know. Null: none.';

create table near_blocks (
    stream text not null,
    number bigint not null check (number >= 0),
    hash bytea not null check (octet_length(hash) = 32),
    primary key (stream, number)
);
comment on table near_blocks is
    'Blocks that the live cursor of a stream has read above the finalized block, and the highest one at or below it. '
    'They show where a reorg began.';
comment on column near_blocks.stream is 'Name of the stream.';
comment on column near_blocks.number is 'Number of the execution block.';
comment on column near_blocks.hash is 'Its hash as it was read.';

create table nodes (
    upstream text not null check (upstream in ('execution', 'beacon', 'ipfs')),
    name text not null,
    state text not null check (state in ('closed', 'open', 'trial')),
    problem text,
    since timestamptz not null,
    log_range integer check (log_range > 0),
    log_range_refused integer check (log_range_refused > 0),
    requests_per_s double precision check (requests_per_s > 0),
    updated_at timestamptz not null default db_now(),
    primary key (upstream, name),
    check ((problem is null) = (state = 'closed'))
);
comment on table nodes is
    'State and learned limits of each configured node: for `status`, the metrics and the next start of the watcher.';
comment on column nodes.upstream is 'Kind of node.';
comment on column nodes.name is 'Redacted URL: scheme://host#hash.';
comment on column nodes.state is
    'State of the circuit breaker. `closed`: in use. `open`: not in use. `trial`: tried again.';
comment on column nodes.problem is 'Why it is not closed.';
comment on column nodes.since is 'Since when it has been in use, or not.';
comment on column nodes.log_range is 'Blocks that one eth_getLogs may span, as learned. Null: not known.';
comment on column nodes.log_range_refused is 'The fewest blocks that were refused for their number. Null: none was.';
comment on column nodes.requests_per_s is 'Learned rate limit, in requests per second. Null: none.';
comment on column nodes.updated_at is 'When the row was written.';

create table validators (
    index bigint primary key,
    pubkey bytea not null check (octet_length(pubkey) = 48),
    credentials bytea not null check (octet_length(credentials) = 32),
    activation_epoch bigint,
    exit_epoch bigint,
    found_at timestamptz not null default db_now()
);
comment on table validators is 'Validators whose withdrawal credentials name a registered vault. From the Beacon API.';
comment on column validators.index is 'Validator index.';
comment on column validators.pubkey is 'BLS public key, 48 bytes.';
comment on column validators.credentials is 'Withdrawal credentials, 32 bytes.';
comment on column validators.activation_epoch is 'Null: not assigned yet. Written once.';
comment on column validators.exit_epoch is 'Null: not assigned yet. Written once.';
comment on column validators.found_at is 'When it was found.';

create table discovery (
    singleton boolean primary key default true check (singleton),
    registry_size bigint not null default 0,
    known_through bigint,
    scanned_at timestamptz,
    scanned_vaults bytea[] not null default '{}',
    problem text
);
insert into discovery default values;
comment on table discovery is 'Progress of the search for validators of registered vaults.';
comment on column discovery.singleton is 'Always true.';
comment on column discovery.registry_size is 'Validators of the whole network that were examined.';
comment on column discovery.known_through is
    'Epoch of the finalized block at the last refresh: every activation and exit up to four epochs later is in '
    '`validators`. Null: never refreshed.';
comment on column discovery.scanned_at is 'When all validators were last examined.';
comment on column discovery.scanned_vaults is 'Addresses for which they were examined.';
comment on column discovery.problem is 'What delays discovery, and with it the streams. Null: nothing.';

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
    vaults integer,
    attempts integer not null default 0,
    next_attempt_at timestamptz,
    problem text,
    seen_at timestamptz not null default db_now(),
    resolved_at timestamptz,
    failure text check (failure in ('unavailable', 'mismatch', 'undecodable')),
    unique (block_number, log_index),
    check ((state = 'pending') = (next_attempt_at is not null))
);
create index reports_due on reports (next_attempt_at) where state = 'pending';
comment on table reports is
    'Published oracle reports. The log is committed with the cursor of the stream `reports`; its file is fetched from '
    'IPFS, verified and turned into events afterwards.';
comment on column reports.id is 'Internal number.';
comment on column reports.block_number is 'Execution block of the log.';
comment on column reports.block_time_s is 'Unix time of that block, in seconds.';
comment on column reports.tx_hash is 'Transaction of the log.';
comment on column reports.log_index is 'Index of the log in its block.';
comment on column reports.oracle is 'Contract that emitted it, 20 bytes.';
comment on column reports.report_timestamp is 'Timestamp in the log: Unix time, in seconds.';
comment on column reports.ref_slot is 'Reference slot in the log.';
comment on column reports.root is 'Merkle root in the log.';
comment on column reports.cid is 'CID of the file in the log.';
comment on column reports.state is
    '`pending`: the file is not verified yet. `resolved`: its events are stored. `empty`: no vault was connected, so '
    'there is no file. `given_up`: an operator cancelled it.';
comment on column reports.vaults is 'Leaves of the Merkle tree. Null until it is verified.';
comment on column reports.attempts is 'Attempts to fetch the file since it is pending.';
comment on column reports.next_attempt_at is 'When the next attempt is due. Null: not pending.';
comment on column reports.problem is 'Why the last attempt failed.';
comment on column reports.seen_at is 'When the log was committed.';
comment on column reports.resolved_at is 'When its events were stored. Null: not resolved.';
comment on column reports.failure is
    'Why there are no events yet. `unavailable`: no gateway has the file. `mismatch`: gateways returned other bytes. '
    '`undecodable`: the published file cannot be read. Null: no attempt has failed.';

create table quarantined_logs (
    id bigint generated always as identity primary key,
    stream text not null,
    block_number bigint not null check (block_number >= 0),
    block_hash bytea not null check (octet_length(block_hash) = 32),
    log_index integer not null,
    tx_hash bytea not null check (octet_length(tx_hash) = 32),
    address bytea not null check (octet_length(address) = 20),
    topics bytea not null check (octet_length(topics) % 32 = 0),
    data bytea not null check (octet_length(data) <= 4096),
    data_bytes integer not null,
    reason text not null,
    more integer not null default 0,
    state text not null default 'open' check (state in ('open', 'resolved', 'dismissed')),
    dismissed_because text,
    first_seen_at timestamptz not null default db_now(),
    changed_at timestamptz,
    unique (stream, block_number, log_index),
    check (state <> 'dismissed' or dismissed_because is not null)
);
create index quarantined_open on quarantined_logs (block_number, stream) include (more) where state = 'open';
create index quarantined_by_address on quarantined_logs (address, id);
create index quarantined_by_state on quarantined_logs (state, id);
comment on table quarantined_logs is
    'Logs of watched addresses that cannot be decoded, stored in the transaction that moves the cursor of their stream '
    'past them. At most 100 for each address in a block. A reorg removes those of orphaned blocks. The registry says '
    'which accounts a log concerns.';
comment on column quarantined_logs.id is 'Internal number.';
comment on column quarantined_logs.stream is 'Stream that read it.';
comment on column quarantined_logs.block_number is 'Execution block.';
comment on column quarantined_logs.block_hash is 'Hash of the block.';
comment on column quarantined_logs.log_index is 'Index of the log in its block.';
comment on column quarantined_logs.tx_hash is 'Transaction of the log.';
comment on column quarantined_logs.address is 'Contract that emitted it.';
comment on column quarantined_logs.topics is 'Topics, 32 bytes each, one after the other.';
comment on column quarantined_logs.data is 'The first 4096 bytes of its data.';
comment on column quarantined_logs.data_bytes is 'Length of its data, in bytes.';
comment on column quarantined_logs.reason is 'Why it cannot be decoded.';
comment on column quarantined_logs.more is
    'Further logs of the address in the block that have no row; in the last row only.';
comment on column quarantined_logs.state is
    '`open`: no event was made of it. `resolved`: it was read again and decoded. `dismissed`: an operator dismissed '
    'it.';
comment on column quarantined_logs.dismissed_because is 'Reason that the operator gave.';
comment on column quarantined_logs.first_seen_at is 'When it was first read.';
comment on column quarantined_logs.changed_at is 'When it was resolved or dismissed.';

create table quarantined_addresses (
    address bytea primary key check (octet_length(address) = 20),
    unnoticed bigint not null default 0,
    noticed_at timestamptz
);
comment on table quarantined_addresses is 'When the operator was last notified of quarantined logs of an address.';
comment on column quarantined_addresses.address is 'The contract, 20 bytes.';
comment on column quarantined_addresses.unnoticed is 'Logs since the last notice.';
comment on column quarantined_addresses.noticed_at is 'When the last notice was written. Null: never.';
