-- migrate:up
-- Who is at which deliveries is told apart from the queue, one row for each webhook of a claim: so the queue is only
-- inserted into and deleted from, and a claim writes as many rows as it has webhooks, not deliveries.
--
--   leases      the deliveries of one webhook that one claim took and that are not settled yet. Every row counts: one
--               whose time is over has to be deleted, and then what it named is due again.
--   queue       one row for each delivery in state `scheduled`, whoever is at it. `turn`: 0 first attempts, 1 retries.
--
-- What is parked, cancelled or delivered while in flight leaves the queue at once; its lease stays until its attempt is
-- settled, so that the result is kept and nobody else sends it meanwhile.
--
-- Lock order everywhere: registry, cursors, events, webhooks, resends, leases, deliveries, queue.

create table leases (
    webhook_id text not null,
    token uuid not null,                                        -- of the claim
    until timestamptz not null,
    delivery_ids bigint[] not null,
    primary key (webhook_id, token)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);

alter table deliveries set (fillfactor = 45);                    -- each row is written once more, all of a page at once

drop function claim_deliveries(integer, uuid, double precision, integer);
delete from queue q using deliveries d where d.id = q.delivery_id and d.state <> 'scheduled';
drop index queue_ready;
alter table queue drop column turn, drop column lease;
alter table queue add turn smallint not null generated always as (least(attempts, 1)) stored;
alter table queue set (fillfactor = 90);
create index queue_ready on queue (webhook_id, turn, due_at);

-- Webhooks take turns: the claim begins after the webhook `after_webhook`, gives each one its free slots, and stops at
-- `wanted`. Where slots are scarce, those that are not `proven` may have fewer. Claims take turns, too, lest two of them
-- count the same free slots of a webhook: the lock comes before the snapshot of the statement that counts. The settings
-- hold the plan to the indexes, whatever the table looked like when it was made.
create function claim_deliveries(
    wanted integer, token uuid, lease_s double precision, per_webhook integer, after_webhook text,
    per_unproven integer, proven text[]
)
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
    token_of_claim uuid := token;
begin
    perform pg_advisory_xact_lock(hashtext('vaultevents claim'), hashtext(current_schema()));
    moment := db_now();
    return query
    with chosen as materialized (
        select w.id as webhook_id, due.delivery_id, due.event_seq, due.attempts, due.place
        from (
            select id, parks from webhooks
            where active and deleted_at is null
                and (paused_until is null or paused_until <= moment) and (parked_until is null or parked_until <= moment)
            order by id collate "C" <= after_webhook, id collate "C"  -- as whoever gives `after_webhook` compares
        ) w cross join lateral (
            -- While the failures of a webhook are not forgotten, one is tried at a time.
            select coalesce(array_agg(each.id), '{}') as leased, greatest(
                case when w.parks > 0 then 1 when w.id = any (proven) then per_webhook
                    else least(per_unproven, per_webhook) end - count(each.id), 0) as free
            from leases l cross join unnest(l.delivery_ids) as each (id) where l.webhook_id = w.id
        ) slots cross join lateral (
            select found.*, row_number() over () as place from (  -- retries are only looked for where there is room
                (
                    select q.delivery_id, q.event_seq, q.attempts from queue q
                    where q.webhook_id = w.id and q.turn = 0 and q.due_at <= moment
                        and q.delivery_id <> all (slots.leased)
                    order by q.due_at limit slots.free
                ) union all (
                    select q.delivery_id, q.event_seq, q.attempts from queue q
                    where q.webhook_id = w.id and q.turn = 1 and q.due_at <= moment
                        and q.delivery_id <> all (slots.leased)
                    order by q.due_at limit slots.free
                )
            ) found limit slots.free
        ) due
        where slots.free > 0 limit wanted
    ), leased as (
        insert into leases (webhook_id, token, until, delivery_ids)
        select c.webhook_id, token_of_claim, moment + make_interval(secs => lease_s), array_agg(c.delivery_id)
        from chosen c group by c.webhook_id
    )
    -- What is the same for all of a webhook is told once, with the first of its deliveries.
    select c.delivery_id, c.attempts, e.id, e.body, c.webhook_id, lead.url, lead.key_ids, lead.sealed, lead.claimed_at
    from chosen c join events e on e.seq = c.event_seq left join lateral (
        select w.url, moment as claimed_at,
            array(select s.key_id from webhook_secrets s where s.webhook_id = w.id
                and (s.valid_until is null or s.valid_until > moment) order by s.created_at desc) as key_ids,
            array(select s.sealed from webhook_secrets s where s.webhook_id = w.id
                and (s.valid_until is null or s.valid_until > moment) order by s.created_at desc) as sealed
        from webhooks w where c.place = 1 and w.id = c.webhook_id
    ) lead on true;
end $$;

-- Writes finished attempts and what became of their deliveries; answers the deliveries that were no longer leased, for
-- which nothing is written. `leased_ids` are all the deliveries, lease by lease: those of a lease end at `ends`. The
-- other arrays go by `ids`, which rise; null stands for an array of nulls, and in `states` for `delivered`. With
-- `after_s` a delivery that is still in the queue is due again. With `unless_failing` nothing is done and the answer is
-- null when one of the webhooks has failures to forget: the caller has to lock them first.
create function settle_deliveries(
    unless_failing boolean,
    webhook_ids text[], tokens uuid[], ends integer[], leased_ids bigint[],
    ids bigint[], numbers integer[], states text[], after_s float8[], started_at timestamptz[], duration_ms integer[],
    statuses smallint[], errors text[], excerpts text[], addresses text[], dns_ms integer[], connect_ms integer[],
    tls_ms integer[], first_byte_ms integer[]
) returns bigint[]
language plpgsql
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
declare
    lost bigint[];
begin
    if unless_failing and exists (select from webhooks where id = any (webhook_ids) and failures > 0) then
        return null;
    end if;
    with named as (
        select webhook_id, token, leased_ids[lag(last, 1, 0) over (order by last) + 1 : last] as settled
        from unnest($2, $3, $4) as n (webhook_id, token, last)
    ), mine as materialized (
        select l.webhook_id, l.token, l.delivery_ids, n.settled
        from named n join leases l on l.webhook_id = n.webhook_id and l.token = n.token
        order by l.webhook_id, l.token for update of l
    ), part as materialized (
        select webhook_id, token,
            case when delivery_ids <@ settled then '{}'
                else array(select id from unnest(delivery_ids) id where id <> all (settled)) end as remaining,
            case when settled <@ delivery_ids then settled
                else array(select id from unnest(settled) id where id = any (delivery_ids)) end as held
        from mine
    ), done as (
        delete from leases l using part
        where l.webhook_id = part.webhook_id and l.token = part.token and part.remaining = '{}'
    ), kept as (
        update leases l set delivery_ids = part.remaining from part
        where l.webhook_id = part.webhook_id and l.token = part.token and part.remaining <> '{}'
    )
    select case when coalesce(sum(cardinality(held)), 0) = cardinality(leased_ids) then '{}'
        else array(select unnest(leased_ids) except select unnest(part.held) from part) end
    from part into lost;

    with result as (
        select * from unnest($6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)
        as r (id, number, state, after_s, started_at, duration_ms, status, error, excerpt, address, dns_ms, connect_ms,
            tls_ms, first_byte_ms)
        where lost = '{}' or r.id <> all (lost)
    ), settled as (
        update deliveries d set
            state = case when coalesce(r.state, 'delivered') = 'delivered' or d.state = 'scheduled'
                    then coalesce(r.state, 'delivered')
                when d.state = 'parked' and r.state = 'exhausted' then r.state else d.state end,
            finished_at = case when coalesce(r.state, 'delivered') in ('delivered', 'exhausted') then db_now()
                else d.finished_at end,
            attempts = r.number
        from result r where d.id = r.id
        returning d.webhook_id, r.*
    ), ended as (
        delete from queue q using settled s
        where q.webhook_id = s.webhook_id and q.delivery_id = s.id and s.after_s is null
    ), postponed as (
        update queue q set attempts = s.number, due_at = db_now() + make_interval(secs => s.after_s) from settled s
        where q.webhook_id = s.webhook_id and q.delivery_id = s.id and s.after_s is not null
    )
    insert into attempts (delivery_id, number, started_at, duration_ms, status, error, excerpt, address,
        dns_ms, connect_ms, tls_ms, first_byte_ms)
    select id, number, started_at, duration_ms, status, error, excerpt, address,
        dns_ms, connect_ms, tls_ms, first_byte_ms from settled;
    return lost;
end $$;

-- Both in one round trip and one commit: the slots of what was accepted are free for what is claimed. The first row says
-- which deliveries were no longer leased; where that is null nothing was done (`unless_failing`).
create function settle_and_claim(
    webhook_ids text[], tokens uuid[], ends integer[], leased_ids bigint[],
    ids bigint[], numbers integer[], states text[], after_s float8[], started_at timestamptz[], duration_ms integer[],
    statuses smallint[], errors text[], excerpts text[], addresses text[], dns_ms integer[], connect_ms integer[],
    tls_ms integer[], first_byte_ms integer[],
    wanted integer, token uuid, lease_s double precision, per_webhook integer, after_webhook text,
    per_unproven integer, proven text[]
) returns table (
    delivery_id bigint, attempts integer, event_id text, body bytea, webhook_id text, url text, key_ids text[],
    sealed bytea[], claimed_at timestamptz, lost bigint[]
)
language plpgsql
as $$
begin
    lost := settle_deliveries(true, $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18);
    return next;
    if lost is not null and wanted > 0 then
        return query select c.*, null::bigint[] from claim_deliveries(
            wanted, token, lease_s, per_webhook, after_webhook, per_unproven, proven
        ) c;
    end if;
end $$;

grant select on leases to vaultevents_api;
alter table leases enable row level security;
create policy own_account on leases to vaultevents_api
    using (exists (select from webhooks w where w.id = webhook_id));
