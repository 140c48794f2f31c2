-- migrate:up
-- The audit of what was read from the chain (C2, I6): a cursor of its own for each stream of blocks, without an end.

alter table cursors
    drop constraint cursors_kind_check,
    drop constraint cursors_check1,
    add constraint cursors_kind_check check (kind in ('live', 'backfill', 'replay', 'audit')),
    add constraint cursors_stop_check check ((stop is null) = (kind in ('live', 'audit')));
create unique index cursors_audit on cursors (stream) where kind = 'audit';

-- Finds the events of a range of blocks. They come nearly in the order of their blocks, so ranges of pages are enough,
-- which cost an insertion next to nothing; several intervals for each, since live events come between those of backfills.
create index events_of_blocks on events
    using brin (block_number int8_minmax_multi_ops) with (pages_per_range = 32, autosummarize = on);
