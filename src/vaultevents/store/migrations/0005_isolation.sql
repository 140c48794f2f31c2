-- migrate:up
-- A dead receiver delays nobody (decisions D7, D8). Claims go per webhook: what is parked is not even looked at, so that it
-- may be a million rows.

alter table webhooks rename parked_until to paused_until;       -- the receiver asked for it (D6)
alter table webhooks
    add failures integer not null default 0,                    -- since the last success, creation or re-enabling
    add first_failure_at timestamptz,
    add last_failure_at timestamptz,
    add parks integer not null default 0,                       -- how often these failures parked it
    add parked_until timestamptz,
    add warned_at timestamptz;                                  -- half time before it is switched off was told

drop index deliveries_due;
create index deliveries_ready on deliveries (webhook_id, least(attempts, 1), next_attempt_at) where state = 'scheduled';
create index deliveries_leased on deliveries (webhook_id) where lease is not null;
drop index deliveries_pending;                                  -- deliveries_by_state answers the same
