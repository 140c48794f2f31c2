-- migrate:up
-- Whose fault it is that a pending report has no events yet (decisions C6): nobody gives its file, a gateway gives other
-- bytes, or the published file itself cannot be read. Null where no attempt has failed since this column exists.

alter table reports add failure text check (failure in ('unavailable', 'mismatch', 'undecodable'));
