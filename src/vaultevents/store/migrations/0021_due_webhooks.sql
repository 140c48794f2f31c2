-- migrate:up
-- A claim visits the webhooks that may have something due, not all of them, so that its cost is that of the work.
--
--   due_webhooks  marks: the webhook may have something to claim, now (`due_at` null) or from `due_at` on. Rows are
--                 only added, by whatever makes a delivery claimable, so that no writer waits for another. A claim
--                 removes the marks of the webhooks that it visits and for which nothing is left to claim; it sees a
--                 mark and what it stands for in one snapshot, so no mark is removed that it has not acted on.
--
-- A webhook with something in its queue has a mark, or as many deliveries in flight as it may have: then the settle
-- that ends their leases marks it. A mark too many costs one visit. Marks are made by triggers on `queue` and
-- `webhooks`, and by whatever deletes leases.

create table due_webhooks (
    webhook_id text collate "C" not null,
    due_at timestamptz                                          -- null: now
) with (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);
create index due_webhooks_now on due_webhooks (webhook_id) where due_at is null;
create index due_webhooks_later on due_webhooks (due_at, webhook_id) where due_at is not null;

alter table due_webhooks enable row level security;              -- nothing for the role of the API

create function mark_queued() returns trigger
language plpgsql security definer
as $$
declare
    moment timestamptz := db_now();
begin
    insert into due_webhooks (webhook_id, due_at)
        select c.webhook_id, case when min(c.due_at) > moment then min(c.due_at) end from changed c group by c.webhook_id;
    return null;
end $$;

create trigger mark_inserted after insert on queue
    referencing new table as changed for each statement execute function mark_queued();
create trigger mark_updated after update on queue
    referencing new table as changed for each statement execute function mark_queued();

create function mark_webhook() returns trigger
language plpgsql security definer
as $$
begin
    insert into due_webhooks (webhook_id) values (new.id);
    return null;
end $$;

create trigger mark_claimable after update on webhooks for each row
    when (new.active and new.deleted_at is null
        and (old.active, old.paused_until, old.parked_until, old.parks)
            is distinct from (new.active, new.paused_until, new.parked_until, new.parks))
    execute function mark_webhook();

do $$
begin
    execute format('alter function mark_queued set search_path = %I, pg_temp', current_schema());
    execute format('alter function mark_webhook set search_path = %I, pg_temp', current_schema());
end $$;

insert into due_webhooks (webhook_id) select distinct webhook_id from queue;

-- Webhooks take turns, in the order of the bytes of their ids, as the caller compares them; indexes of other tables are
-- used only with the default collation. The claim begins after the webhook `after_webhook`, gives each its free slots, and stops at
-- `wanted`. A webhook has `per_webhook` slots, or those that `limited` and `limits` name for it; while its failures
-- are not forgotten it has a single one, for the oldest delivery that is due: those that were attempted before those
-- that were not. Otherwise first attempts go before retries. Where slots are scarce, webhooks that are not `proven` have
-- at most `per_unproven`, and those of the accounts `closed` get nothing. Claims take turns, too, lest two of them count the
-- same free slots of a webhook: the lock comes before the snapshot of the statement that counts. The settings hold the
-- plan to the indexes, whatever the tables looked like when it was made.
create function claim_due(
    wanted integer, token uuid, lease_s double precision, per_webhook integer, after_webhook text,
    per_unproven integer, proven text[], limited text[], limits integer[], closed text[]
)
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
    token_of_claim uuid := token;
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
        select v.webhook_id, token_of_claim, moment + make_interval(secs => lease_s), v.delivery_ids
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

-- As before, for processes of the version before that still run.
create or replace function claim_deliveries(
    wanted integer, token uuid, lease_s double precision, per_webhook integer, after_webhook text,
    per_unproven integer, proven text[]
)
returns table (
    delivery_id bigint, attempts integer, event_id text, body bytea, webhook_id text, url text, key_ids text[],
    sealed bytea[], claimed_at timestamptz
)
language sql
as $$
    select c.delivery_id, c.attempts, c.event_id, c.body, c.webhook_id, c.url, c.key_ids, c.sealed, c.claimed_at
    from claim_due(wanted, token, lease_s, per_webhook, after_webhook, per_unproven, proven, '{}', '{}', '{}') c
$$;
-- As before, but that the webhooks are marked whose leases end; with `unless_failing` the caller does it.
create or replace function settle_deliveries(
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
    owners text[] := webhook_ids;
begin
    if unless_failing and exists (select from webhooks where id = any (webhook_ids) and failures > 0) then
        return null;
    end if;
    if cardinality(ids) = 1 and states is null then             -- the same for what is by far the most frequent, in less
        delete from leases l
            where l.webhook_id = webhook_ids[1] and l.token = tokens[1] and l.delivery_ids = leased_ids;
        if found then
            update deliveries d set state = 'delivered', finished_at = db_now(), attempts = numbers[1] where d.id = ids[1];
            if found then
                delete from queue q where q.webhook_id = webhook_ids[1] and q.delivery_id = ids[1];
                insert into attempts (delivery_id, number, started_at, duration_ms, status, error, excerpt, address,
                        dns_ms, connect_ms, tls_ms, first_byte_ms)
                    values (ids[1], numbers[1], started_at[1], duration_ms[1], statuses[1], errors[1], excerpts[1],
                        addresses[1], dns_ms[1], connect_ms[1], tls_ms[1], first_byte_ms[1]);
            end if;
            if not unless_failing then
                insert into due_webhooks (webhook_id) values (owners[1]);
            end if;
            return '{}';
        end if;
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
    )
    insert into attempts (delivery_id, number, started_at, duration_ms, status, error, excerpt, address,
        dns_ms, connect_ms, tls_ms, first_byte_ms)
    select id, number, started_at, duration_ms, status, error, excerpt, address,
        dns_ms, connect_ms, tls_ms, first_byte_ms from settled;
    if after_s is not null then
        update queue q set attempts = r.number, due_at = db_now() + make_interval(secs => r.after_s)
            from unnest(ids, numbers, after_s) as r (id, number, after_s) join deliveries d on d.id = r.id
            where r.after_s is not null and (lost = '{}' or r.id <> all (lost))
                and q.webhook_id = d.webhook_id and q.delivery_id = r.id;
    end if;
    if not unless_failing then
        insert into due_webhooks (webhook_id) select distinct unnest(owners);
    end if;
    return lost;
end $$;

-- Both in one round trip and one commit: the slots of what was accepted are free for what is claimed. The first row has
-- the deliveries that were no longer leased; where that is null nothing was done (`unless_failing`). What the webhooks
-- have left is looked at after the lock is held: then no claim runs that counted the slots that end here.
create function settle_and_claim_due(
    webhook_ids text[], tokens uuid[], ends integer[], leased_ids bigint[],
    ids bigint[], numbers integer[], states text[], after_s float8[], started_at timestamptz[], duration_ms integer[],
    statuses smallint[], errors text[], excerpts text[], addresses text[], dns_ms integer[], connect_ms integer[],
    tls_ms integer[], first_byte_ms integer[],
    wanted integer, token uuid, lease_s double precision, per_webhook integer, after_webhook text,
    per_unproven integer, proven text[], limited text[], limits integer[], closed text[]
) returns table (
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
    owners text[] := webhook_ids;
begin
    lost := settle_deliveries(true, $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18);
    if lost is not null then
        if wanted > 0 then
            perform pg_advisory_xact_lock(hashtext('vaultevents claim'), hashtext(current_schema()));
        end if;
        moment := db_now();
        insert into due_webhooks (webhook_id)
            select distinct o.webhook_id from unnest(owners) as o (webhook_id)
            where wanted = 0
                or exists (select from queue q where q.webhook_id = o.webhook_id and q.turn = 0 and q.due_at <= moment)
                or exists (select from queue q where q.webhook_id = o.webhook_id and q.turn = 1 and q.due_at <= moment);
    end if;
    return next;
    if lost is not null and wanted > 0 then
        return query select c.*, null::bigint[] from claim_due(
            wanted, token, lease_s, per_webhook, after_webhook, per_unproven, proven, limited, limits, closed
        ) c;
    end if;
end $$;

-- As before, for processes of the version before that still run.
create or replace function settle_and_claim(
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
language sql
as $$
    select c.delivery_id, c.attempts, c.event_id, c.body, c.webhook_id, c.url, c.key_ids, c.sealed, c.claimed_at, c.lost
    from settle_and_claim_due($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20,
        $21, $22, $23, $24, $25, '{}', '{}', '{}') c
$$;
