-- migrate:up
-- Logs that are read above the finalized block (decisions C1), where a reorganisation may take them back.
--
--   near_blocks     hashes of the blocks that the live cursor of a stream has read above the finalized block, and of the
--                   highest one at or below it: to find where a reorganisation began
--   events          `near_head`: first seen above the finalized block. `orphaned_at`: its log is gone from the chain; null
--                   again when it comes back
--   deliveries      `withdrawn`: not sent, because the event was orphaned first. It is scheduled again when that comes back
--   interrupted     events first seen near the head of which an attempt was begun and never settled: they may be out
--
-- Lock order everywhere: registry, cursors, events, webhooks, resends, leases, deliveries, queue.

create table near_blocks (
    stream text not null,
    number bigint not null check (number >= 0),
    hash bytea not null check (octet_length(hash) = 32),
    primary key (stream, number)
);

alter table cursors
    add rewinds bigint not null default 0,
    add rewound_at timestamptz;

alter table events add near_head boolean not null default false, add orphaned_at timestamptz;
create index events_near_head on events (block_number) where near_head;
create index events_orphaned on events (orphaned_at) where orphaned_at is not null;

alter table deliveries drop constraint deliveries_state_check;
alter table deliveries add constraint deliveries_state_check
    check (state in ('scheduled', 'parked', 'delivered', 'exhausted', 'cancelled', 'withdrawn'));

create table interrupted (
    event_seq bigint primary key
);
