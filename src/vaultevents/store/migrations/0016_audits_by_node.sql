-- migrate:up
-- Each execution node is asked alone for what was read, on an audit cursor of its own (C2, I6); and the first block in
-- a row whose header or receipts are of a form that this version does not know.

alter table cursors
    add column node text,
    add column unverified_from bigint,
    add constraint cursors_node_check check (node is null or kind = 'audit');
drop index cursors_audit;
create unique index cursors_audit on cursors (stream, node) nulls not distinct where kind = 'audit';
