-- migrate:up
-- What is still to be attempted lies apart from what became of it, so that the hot table is as small as the work that
-- is left: a claim and a settle cost the same beside millions of finished deliveries.
--
--   queue       one row for each delivery in state `scheduled`. A row with a lease stays until its attempt is settled,
--               also when its delivery was parked, cancelled or delivered meanwhile: so the result is kept.
--               `turn`: 0 first attempts, 1 retries, 2 leased. No foreign keys: the row is made in one statement with
--               its delivery, and the ledger watches over it.
--   deliveries  loses the columns of the schedule.
--   attempts    how long each phase took; null for what a kept connection skips, or what was not reached.
--
-- Lock order everywhere: registry, cursors, events, webhooks, queue, deliveries.

create table queue (
    webhook_id text not null,
    delivery_id bigint not null,
    event_seq bigint not null,
    attempts integer not null default 0,                        -- those that are over
    due_at timestamptz not null,                                -- while leased: when the lease ends
    lease uuid,
    turn smallint not null generated always as (case when lease is not null then 2 else least(attempts, 1) end) stored,
    primary key (webhook_id, delivery_id)
) with (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);

insert into queue (delivery_id, event_seq, webhook_id, attempts, due_at, lease)
    select id, event_seq, webhook_id, attempts, coalesce(next_attempt_at, db_now()), lease
    from deliveries where state = 'scheduled' or lease is not null;

create index queue_ready on queue (webhook_id, turn, due_at);

alter table deliveries drop column next_attempt_at, drop column lease;  -- their indexes and checks go with them

-- Success changes no indexed column, so that it rewrites no index: only what is set apart is found by its state.
alter table deliveries set (fillfactor = 80),
    add apart text generated always as (nullif(nullif(state, 'scheduled'), 'delivered')) stored;
create index deliveries_apart on deliveries (webhook_id, apart, id) where apart is not null;
drop index deliveries_by_state;

alter table attempts drop constraint attempts_delivery_id_fkey,
    add dns_ms integer, add connect_ms integer, add tls_ms integer, add first_byte_ms integer;

-- Claims take turns, lest two of them count the same free slots of a webhook: the lock comes before the snapshot of the
-- statement that counts. The settings hold the plan to the indexes, whatever the table looked like when it was made.
create function claim_deliveries(wanted integer, token uuid, lease_s double precision, per_webhook integer)
returns table (
    delivery_id bigint, attempts integer, event_id text, body bytea, webhook_id text, url text, key_ids text[],
    sealed bytea[], claimed_at timestamptz
)
language plpgsql
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
declare
    moment timestamptz;
begin
    perform pg_advisory_xact_lock(hashtext('vaultevents claim'), hashtext(current_schema()));
    moment := db_now();
    return query
    with open as materialized (
        -- While the failures of a webhook are not forgotten, one is tried at a time.
        select w.id, slots.free
        from webhooks w cross join lateral (
            select (case when w.parks > 0 then 1 else per_webhook end - count(*))::integer as free
            from queue q where q.webhook_id = w.id and q.turn = 2 and q.due_at > moment
        ) slots
        where w.active and w.deleted_at is null and slots.free > 0
            and (w.paused_until is null or w.paused_until <= moment)
            and (w.parked_until is null or w.parked_until <= moment)
            and (exists (select from queue q where q.webhook_id = w.id and q.turn = 0 and q.due_at <= moment)
              or exists (select from queue q where q.webhook_id = w.id and q.turn = 1 and q.due_at <= moment)
              or exists (select from queue q where q.webhook_id = w.id and q.turn = 2 and q.due_at <= moment))
    ), share as materialized (
        select greatest(ceil(wanted::float8 / greatest(count(*), 1)), 1)::integer as most from open
    ), candidates as materialized (
        select open.id as webhook_id, due.delivery_id, due.due_at,
            row_number() over (partition by open.id order by due.turn, due.due_at) as place
        from open cross join share cross join lateral (
            select * from (
                select * from (
                    select q.delivery_id, q.turn, q.due_at from queue q
                    where q.webhook_id = open.id and q.turn = 0 and q.due_at <= moment
                    order by q.due_at limit least(open.free, share.most) for update skip locked
                ) first
                union all select * from (
                    select q.delivery_id, q.turn, q.due_at from queue q
                    where q.webhook_id = open.id and q.turn = 1 and q.due_at <= moment
                    order by q.due_at limit least(open.free, share.most) for update skip locked
                ) again
                union all select * from (
                    select q.delivery_id, 1, q.due_at from queue q
                    where q.webhook_id = open.id and q.turn = 2 and q.due_at <= moment
                    order by q.due_at limit least(open.free, share.most) for update skip locked
                ) abandoned
            ) each order by turn, due_at limit least(open.free, share.most)
        ) due
    ), leased as (
        update queue q set lease = token, due_at = moment + make_interval(secs => lease_s)
        from (select c.webhook_id, c.delivery_id from candidates c order by c.place, c.due_at limit wanted) chosen
        where q.webhook_id = chosen.webhook_id and q.delivery_id = chosen.delivery_id
        returning q.delivery_id, q.event_seq, q.webhook_id, q.attempts
    ), placed as (
        select l.*, row_number() over (partition by l.webhook_id) = 1 as leads from leased l
    )
    -- What is the same for all of a webhook is told once, with the first of its deliveries.
    select p.delivery_id, p.attempts, e.id, e.body, p.webhook_id, lead.url, lead.key_ids, lead.sealed, lead.claimed_at
    from placed p join events e on e.seq = p.event_seq left join lateral (
        select w.url, moment as claimed_at,
            array(select s.key_id from webhook_secrets s where s.webhook_id = w.id
                and (s.valid_until is null or s.valid_until > moment) order by s.created_at desc) as key_ids,
            array(select s.sealed from webhook_secrets s where s.webhook_id = w.id
                and (s.valid_until is null or s.valid_until > moment) order by s.created_at desc) as sealed
        from webhooks w where p.leads and w.id = p.webhook_id
    ) lead on true;
end $$;

grant select, insert, delete on queue to vaultevents_api;
alter table queue enable row level security;
create policy own_account on queue to vaultevents_api
    using (exists (select from webhooks w where w.id = webhook_id));
