-- migrate:up
-- Finished attempts and claims are passed as one value of a composite type each, not as parallel arrays.
--
--   settlement     one finished attempt and the state that it leads to; `after_s` with state `scheduled` only
--   claim_request  what one claim may take (`claim_due`)
--
-- The functions with parallel arguments stay for processes of the version before, which may still run.

create type settlement as (
    id bigint,                                                  -- of the delivery
    webhook_id text,
    lease uuid,
    number integer,                                             -- of the attempt
    state text,
    after_s float8,
    started_at timestamptz,
    duration_ms integer,
    status smallint,
    error text,
    excerpt text,
    address text,
    dns_ms integer,
    connect_ms integer,
    tls_ms integer,
    first_byte_ms integer
);

create type claim_request as (
    wanted integer,
    lease uuid,
    lease_s float8,
    per_webhook integer,
    after_webhook text,                                         -- the webhook that the last claim ended with
    per_unproven integer,                                       -- slots of webhooks that are not `proven`
    proven text[],
    limited text[],                                             -- webhooks with other slots than `per_webhook`
    limits integer[],                                           -- these slots, in the same order
    closed_accounts text[]
);

-- Writes finished attempts, given in the order of their ids, and the new states of their deliveries. Returns the
-- deliveries that were no longer leased: nothing is written for these. With `unless_failing` the function does nothing
-- and returns null if one of the webhooks has failures to forget: the caller has to lock these webhooks first.
-- Without it the webhooks whose leases end are marked; with it the caller does so.
create function settle_deliveries(settlements settlement[], unless_failing boolean) returns bigint[]
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
    owners text[] := array(select distinct webhook_id from unnest(settlements));
    only_one settlement := settlements[1];
begin
    if unless_failing and exists (select from webhooks where id = any (owners) and failures > 0) then
        return null;
    end if;
    if cardinality(settlements) = 1 and only_one.state = 'delivered' then  -- by far the most frequent: the same, in less
        delete from leases l where l.webhook_id = only_one.webhook_id and l.token = only_one.lease
            and l.delivery_ids = array[only_one.id];
        if found then
            update deliveries d set state = 'delivered', finished_at = db_now(), attempts = only_one.number
                where d.id = only_one.id;
            if found then
                delete from queue q where q.webhook_id = only_one.webhook_id and q.delivery_id = only_one.id;
                insert into attempts (delivery_id, number, started_at, duration_ms, status, error, excerpt, address,
                        dns_ms, connect_ms, tls_ms, first_byte_ms)
                    values (only_one.id, only_one.number, only_one.started_at, only_one.duration_ms, only_one.status,
                        only_one.error, only_one.excerpt, only_one.address, only_one.dns_ms, only_one.connect_ms,
                        only_one.tls_ms, only_one.first_byte_ms);
            end if;
            if not unless_failing then
                insert into due_webhooks (webhook_id) values (only_one.webhook_id);
            end if;
            return '{}';
        end if;
    end if;
    with named as (
        select webhook_id, lease as token, array_agg(id) as settled from unnest(settlements) group by webhook_id, lease
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
    select case when coalesce(sum(cardinality(held)), 0) = cardinality(settlements) then '{}'
        else array(select id from unnest(settlements) except select unnest(part.held) from part) end
    from part into lost;

    with result as (
        select * from unnest(settlements) r where lost = '{}' or r.id <> all (lost)
    ), settled as (
        update deliveries d set
            state = case when r.state = 'delivered' or d.state = 'scheduled' then r.state
                when d.state = 'parked' and r.state = 'exhausted' then r.state else d.state end,
            finished_at = case when r.state in ('delivered', 'exhausted') then db_now() else d.finished_at end,
            attempts = r.number
        from result r where d.id = r.id
        returning r.*
    ), ended as (
        delete from queue q using settled s
        where q.webhook_id = s.webhook_id and q.delivery_id = s.id and s.state <> 'scheduled'
    )
    insert into attempts (delivery_id, number, started_at, duration_ms, status, error, excerpt, address,
        dns_ms, connect_ms, tls_ms, first_byte_ms)
    select id, number, started_at, duration_ms, status, error, excerpt, address,
        dns_ms, connect_ms, tls_ms, first_byte_ms from settled;
    if exists (select from unnest(settlements) s where s.state = 'scheduled') then
        update queue q set attempts = r.number, due_at = db_now() + make_interval(secs => r.after_s)
            from unnest(settlements) r
            where r.state = 'scheduled' and (lost = '{}' or r.id <> all (lost))
                and q.webhook_id = r.webhook_id and q.delivery_id = r.id;
    end if;
    if not unless_failing then
        insert into due_webhooks (webhook_id) select unnest(owners);
    end if;
    return lost;
end $$;

-- Leases what is due. Webhooks take turns, in the order of the bytes of their ids, as the caller compares them; indexes of
-- other tables are used only with the default collation. The claim begins after the webhook `after_webhook`, gives each
-- its free slots, and stops at `wanted`. A webhook has `per_webhook` slots, or those that `limited` and `limits` name for
-- it; while its failures are not forgotten it has a single one, for the oldest delivery that is due: those that were
-- attempted before those that were not. Otherwise first attempts go before retries. Where slots are scarce, webhooks that
-- are not `proven` have at most `per_unproven`, and those of `closed_accounts` get nothing. Claims take turns, too, so
-- that no two count the same free slots of a webhook: the lock is taken before the snapshot of the statement that counts.
-- The settings hold the plan to the indexes, whatever the tables looked like when it was made.
create function claim_due(request claim_request)
returns table (
    delivery_id bigint, attempts integer, event_id text, body bytea, webhook_id text, account_id text, url text,
    key_ids text[], sealed bytea[], claimed_at timestamptz
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
    moment timestamptz := db_now();
    wanted constant integer := request.wanted;
    after_webhook constant text := request.after_webhook;
    per_webhook constant integer := request.per_webhook;
    per_unproven constant integer := request.per_unproven;
    proven constant text[] := request.proven;
    limited constant text[] := request.limited;
    limits constant integer[] := request.limits;
    closed constant text[] := request.closed_accounts;
begin
    if not exists (select from due_webhooks where due_at is null)
            and not exists (select from due_webhooks where due_at <= moment) then
        return;
    end if;
    perform pg_advisory_xact_lock(hashtext('vaultevents claim'), hashtext(current_schema()));
    moment := db_now();
    if exists (select from due_webhooks where due_at <= moment) then
        update due_webhooks set due_at = null
            where ctid = any (array(select ctid from due_webhooks where due_at <= moment order by due_at limit 10000));
    end if;
    return query
    with recursive visits as (
        select (after_webhook collate "C") as webhook_id, null::text as account_id, false as wrapped, 0 as taken,
            null::bigint[] as delivery_ids, null::bigint[] as event_seqs, null::integer[] as attempts,
            false as leaves, null::timestamptz as again_at
        union all
        select next.webhook_id collate "C", w.account_id, next.wrapped, v.taken + coalesce(cardinality(due.delivery_ids), 0),
            due.delivery_ids, due.event_seqs, due.attempts, fate.leaves,
            case when fate.leaves then case when open.paused then w.paused_until when fate.drained then later.due_at end
            end
        from visits v cross join lateral (
            select found.webhook_id collate "default" as webhook_id, found.wrapped from (
                (
                    select d.webhook_id, false as wrapped from due_webhooks d
                    where not v.wrapped and d.due_at is null and d.webhook_id > v.webhook_id
                    order by d.webhook_id limit 1
                ) union all (
                    select d.webhook_id, true from due_webhooks d
                    where d.due_at is null and d.webhook_id <= after_webhook
                        and d.webhook_id > case when v.wrapped then v.webhook_id else '' end
                    order by d.webhook_id limit 1
                )
            ) found limit 1
        ) next left join lateral (
            select w.account_id, w.parks > 0 as probed, w.active and w.deleted_at is null as active,
                greatest(w.paused_until, w.parked_until) as paused_until,
                case when w.parks > 0 then 1
                    else coalesce(limits[array_position(limited, w.id)], per_webhook) end as slots
            from webhooks w where w.id = next.webhook_id
        ) w on true cross join lateral (
            select coalesce(w.active, false) as active, coalesce(w.paused_until > moment, false) as paused,
                coalesce(w.account_id = any (closed), false) as closed,
                case when w.probed or next.webhook_id = any (proven) then w.slots
                    else least(w.slots, per_unproven) end as slots
        ) open cross join lateral (
            select coalesce(array_agg(each.id), '{}') as leased, count(each.id)::integer as number
            from leases l cross join unnest(l.delivery_ids) as each (id)
            where open.active and not open.paused and not open.closed and l.webhook_id = next.webhook_id
        ) flight cross join lateral (
            select case when open.active and not open.paused and not open.closed
                then greatest(least(open.slots - flight.number, wanted - v.taken), 0) else 0 end as number
        ) free left join lateral (
            select array_agg(found.delivery_id) as delivery_ids, array_agg(found.event_seq) as event_seqs,
                array_agg(found.attempts) as attempts
            from (
                select chosen.* from (
                    (
                        select q.delivery_id, q.event_seq, q.attempts from queue q
                        where q.webhook_id = next.webhook_id and q.turn = w.probed::integer::smallint
                            and q.due_at <= moment and q.delivery_id <> all (flight.leased)
                        order by q.due_at limit free.number
                    ) union all (
                        select q.delivery_id, q.event_seq, q.attempts from queue q
                        where q.webhook_id = next.webhook_id and q.turn = (not w.probed)::integer::smallint
                            and q.due_at <= moment and q.delivery_id <> all (flight.leased)
                        order by q.due_at limit free.number
                    )
                ) chosen limit free.number
            ) found
        ) due on free.number > 0 cross join lateral (
            select drained, not open.active or open.paused or not open.closed
                and (drained or flight.number + coalesce(cardinality(due.delivery_ids), 0) >= w.slots) as leaves
            from (select free.number > coalesce(cardinality(due.delivery_ids), 0) as drained) d
        ) fate left join lateral (
            select least(
                (select q.due_at from queue q where q.webhook_id = next.webhook_id and q.turn = 0 and q.due_at > moment
                    order by q.due_at limit 1),
                (select q.due_at from queue q where q.webhook_id = next.webhook_id and q.turn = 1 and q.due_at > moment
                    order by q.due_at limit 1)
            ) as due_at
        ) later on fate.drained
        where v.taken < wanted
    ), removed as (
        delete from due_webhooks
        where due_at is null and webhook_id = any (array(select v.webhook_id from visits v where v.leaves))
    ), postponed as (
        insert into due_webhooks (webhook_id, due_at)
        select v.webhook_id, v.again_at from visits v where v.again_at is not null and not exists (
            select from due_webhooks d where d.due_at = v.again_at and d.webhook_id = v.webhook_id)
    ), leased as (
        insert into leases (webhook_id, token, until, delivery_ids)
        select v.webhook_id, request.lease, moment + make_interval(secs => request.lease_s), v.delivery_ids
        from visits v where v.delivery_ids is not null
    )
    -- What is the same for all of a webhook stands once, with the first of its deliveries.
    select c.delivery_id, c.attempts, e.id, e.body, v.webhook_id, lead.account_id, lead.url, lead.key_ids, lead.sealed,
        lead.claimed_at
    from visits v cross join lateral unnest(v.delivery_ids, v.event_seqs, v.attempts)
            with ordinality as c (delivery_id, event_seq, attempts, place)
        join events e on e.seq = c.event_seq left join lateral (
        select v.account_id, w.url, moment as claimed_at,
            array(select s.key_id from webhook_secrets s where s.webhook_id = w.id
                and (s.valid_until is null or s.valid_until > moment) order by s.created_at desc) as key_ids,
            array(select s.sealed from webhook_secrets s where s.webhook_id = w.id
                and (s.valid_until is null or s.valid_until > moment) order by s.created_at desc) as sealed
        from webhooks w where c.place = 1 and w.id = v.webhook_id collate "default"
    ) lead on true
    where v.delivery_ids is not null;
end $$;

-- Both in one round trip and one commit: the slots of what was accepted are free for what is claimed. The first row has
-- the deliveries that were no longer leased; where that is null nothing was done (`unless_failing`). What the webhooks
-- have left is read after the lock is taken: then no claim runs that counted the slots that end here.
create function settle_and_claim(settlements settlement[], request claim_request)
returns table (
    delivery_id bigint, attempts integer, event_id text, body bytea, webhook_id text, account_id text, url text,
    key_ids text[], sealed bytea[], claimed_at timestamptz, lost bigint[]
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
    wanted constant integer := request.wanted;
begin
    lost := settle_deliveries(settlements, true);
    if lost is not null then
        if wanted > 0 then
            perform pg_advisory_xact_lock(hashtext('vaultevents claim'), hashtext(current_schema()));
        end if;
        moment := db_now();
        insert into due_webhooks (webhook_id)
            select o.webhook_id from (select distinct s.webhook_id from unnest(settlements) s) o
            where wanted = 0
                or exists (select from queue q where q.webhook_id = o.webhook_id and q.turn = 0 and q.due_at <= moment)
                or exists (select from queue q where q.webhook_id = o.webhook_id and q.turn = 1 and q.due_at <= moment);
    end if;
    return next;
    if lost is not null and wanted > 0 then
        return query select c.*, null::bigint[] from claim_due(request) c;
    end if;
end $$;

-- A resend that waits is a row of the queue, and one that is in flight is named by a lease, as deliveries are.
--
--   queue     a row is a delivery (`delivery_id`) or a request for one more attempt (`resend_id`, of `resends`). `turn`:
--             0 first attempts, 1 retries, 2 resends. `event_seq` is null for a test, which is no event
--   leases    of deliveries (`delivery_ids`) or of resends (`resend_ids`), never both
--   resends   the requests and what came of them. `lease`: the token of the last claim, null again when the attempt is
--             settled or put back, so that what is in flight is not deleted. `due_at` is no longer used

alter table queue drop constraint queue_pkey, alter delivery_id drop not null, alter event_seq drop not null,
    add resend_id bigint, drop column turn,
    add check (num_nonnulls(delivery_id, resend_id) = 1),
    add check (event_seq is not null or resend_id is not null);
alter table queue add turn smallint not null
    generated always as (case when resend_id is not null then 2 else least(attempts, 1) end) stored;
create unique index queue_of_delivery on queue (webhook_id, delivery_id);
create unique index queue_of_resend on queue (webhook_id, resend_id) where resend_id is not null;
create index queue_ready on queue (webhook_id, turn, due_at);

alter table leases add resend_ids bigint[] not null default '{}';

drop index resends_waiting, resends_leased;
insert into queue (webhook_id, resend_id, event_seq, due_at)
    select webhook_id, id, event_seq, due_at from resends where finished_at is null;

-- Marks are for claims of deliveries.
create or replace function mark_queued() returns trigger
language plpgsql security definer
as $$
declare
    moment timestamptz := db_now();
begin
    insert into due_webhooks (webhook_id, due_at)
        select c.webhook_id, case when min(c.due_at) > moment then min(c.due_at) end
        from changed c where c.delivery_id is not null group by c.webhook_id;
    return null;
end $$;
do $$
begin
    execute format('alter function mark_queued set search_path = %I, pg_temp', current_schema());
end $$;
