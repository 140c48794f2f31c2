-- migrate:up
-- What the process that watches knows of the nodes of each upstream: for `status` and the metrics, and so that it need
-- not learn a node's limits again after a restart. One row for each configured URL, by its redacted name.
create table nodes (
    upstream text not null check (upstream in ('execution', 'beacon', 'ipfs')),
    name text not null,                                         -- scheme://host#hash, never the URL
    state text not null check (state in ('closed', 'open', 'trial')),
    problem text,                                               -- why it is not closed
    since timestamptz not null,                                 -- in use since then, or not
    log_range integer check (log_range > 0),                    -- blocks that one eth_getLogs may span
    log_range_refused integer check (log_range_refused > 0),    -- the fewest that were refused for their number
    requests_per_s double precision check (requests_per_s > 0), -- null: as many as we like
    updated_at timestamptz not null default db_now(),
    primary key (upstream, name),
    check ((problem is null) = (state = 'closed'))
);
