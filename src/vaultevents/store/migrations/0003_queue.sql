-- From an event to its receiver: deliveries, the queue of what is still to be attempted, attempts and notices.
--
-- A claim takes rows of `queue` under a lease; a settle writes the attempt, the state of the delivery and ends the
-- lease.

create table deliveries (
    id bigint generated always as identity primary key,
    event_seq bigint not null references events,
    webhook_id text not null references webhooks,
    state text not null
        check (state in ('scheduled', 'parked', 'delivered', 'exhausted', 'cancelled', 'withdrawn')),
    attempts integer not null default 0,
    created_at timestamptz not null default db_now(),
    finished_at timestamptz,
    apart text generated always as (nullif(nullif(state, 'scheduled'), 'delivered')) stored,
    recovered boolean not null default false,
    unique (event_seq, webhook_id)
) with (fillfactor = 45);  -- each row is written once more, all rows of a page at once
create index deliveries_of_webhook on deliveries (webhook_id, id);
create index deliveries_apart on deliveries (webhook_id, apart, id) where apart is not null;
comment on table deliveries is
    'Event × webhook: one row for each that matched when the event was committed, and what became of it.';
comment on column deliveries.id is 'Internal number.';
comment on column deliveries.event_seq is 'The event: events.seq.';
comment on column deliveries.webhook_id is 'The webhook.';
comment on column deliveries.state is
    'scheduled: in the queue. parked: its webhook is off. delivered: answered with 2xx. exhausted: every attempt '
    'failed. cancelled: its webhook was deleted. withdrawn: the event was orphaned before it was sent.';
comment on column deliveries.attempts is 'Attempts that are over.';
comment on column deliveries.created_at is 'When the delivery was created.';
comment on column deliveries.finished_at is 'When it reached its last state. Null while it may still be attempted.';
comment on column deliveries.apart is
    '`state`, null for scheduled and delivered. A success therefore changes no indexed column and rewrites no index.';
comment on column deliveries.recovered is
    'Created by the result of a resend: the event had not matched when it was committed.';

create trigger count_inserted after insert on deliveries
    referencing new table as changed for each statement execute function count_rows();
create trigger count_deleted after delete on deliveries
    referencing old table as changed for each statement execute function count_rows();
create trigger count_truncated after truncate on deliveries for each statement execute function count_rows();

create function recount_rows() returns void
language plpgsql
as $$
begin
    lock table events, deliveries in share row exclusive mode;
    delete from row_totals;
    insert into row_totals (counted, difference)
        select 'events', count(*) from events union all select 'deliveries', count(*) from deliveries;
end $$;
comment on function recount_rows() is
    'Count events and deliveries again. For a database whose rows were copied with its triggers off. Writers wait.';

select recount_rows();

create table attempts (
    delivery_id bigint not null,
    number integer not null,
    started_at timestamptz not null,
    duration_ms integer not null,
    status smallint,
    error text,
    excerpt text not null,
    address text,
    dns_ms integer,
    connect_ms integer,
    tls_ms integer,
    first_byte_ms integer,
    primary key (delivery_id, number)
);
comment on table attempts is
    'POSTs of deliveries and what was answered. Append-only. No foreign key: a settle writes delivery and attempt at '
    'once.';
comment on column attempts.delivery_id is 'The delivery: deliveries.id.';
comment on column attempts.number is 'From 1, in order.';
comment on column attempts.started_at is 'Start of the POST, by the clock of the process.';
comment on column attempts.duration_ms is 'Whole duration, in milliseconds.';
comment on column attempts.status is 'HTTP status. Null: no complete answer.';
comment on column attempts.error is 'Why there is no complete answer. Null: there is a status.';
comment on column attempts.excerpt is 'Beginning of the answer''s body.';
comment on column attempts.address is 'IP address of the receiver. Null: none was resolved.';
comment on column attempts.dns_ms is
    'Name resolution, in milliseconds. Null: skipped or not reached, as in the columns after it.';
comment on column attempts.connect_ms is 'TCP connection, in milliseconds.';
comment on column attempts.tls_ms is 'TLS handshake, in milliseconds.';
comment on column attempts.first_byte_ms is 'From the start of the attempt to the first byte of the answer, in milliseconds.';

create table pruned (
    webhook_id text not null,
    chunk bigint not null,
    state text not null check (state in ('delivered', 'cancelled')),
    recovered boolean not null,
    events int8multirange not null,
    primary key (webhook_id, chunk, state, recovered)
);
comment on table pruned is
    'The exact set of deliveries whose rows were pruned: the audit still proves each of them and `recover` resends '
    'none.';
comment on column pruned.webhook_id is 'The webhook.';
comment on column pruned.chunk is 'events.seq >> 10, so that a pruning batch rewrites small rows.';
comment on column pruned.state is 'Their state.';
comment on column pruned.recovered is 'As deliveries.recovered.';
comment on column pruned.events is 'Ranges of events.seq.';

create table interrupted (
    event_seq bigint primary key
);
comment on table interrupted is
    'Events first seen near the head with an attempt that was started and never settled: the receiver may have them.';
comment on column interrupted.event_seq is 'The event: events.seq.';

-- The queue. It is as small as the work that is left, so a claim costs the same beside millions of finished deliveries.

create table queue (
    webhook_id text not null,
    delivery_id bigint,
    resend_id bigint,
    event_seq bigint,
    attempts integer not null default 0,
    due_at timestamptz not null,
    turn smallint not null
        generated always as (case when resend_id is not null then 2 else least(attempts, 1) end) stored,
    check (num_nonnulls(delivery_id, resend_id) = 1),
    check (event_seq is not null or resend_id is not null)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
        fillfactor = 90);
create unique index queue_of_delivery on queue (webhook_id, delivery_id);
create unique index queue_of_resend on queue (webhook_id, resend_id) where resend_id is not null;
create index queue_ready on queue (webhook_id, turn, due_at);
comment on table queue is
    'One row for each delivery in state `scheduled` and each request for one more attempt, leased or not. No foreign '
    'keys: one statement writes it with its delivery or request, and the audit compares queue and deliveries.';
comment on column queue.webhook_id is 'The webhook.';
comment on column queue.delivery_id is 'The delivery: deliveries.id. Null: a request.';
comment on column queue.resend_id is 'The request: resends.id. Null: a delivery.';
comment on column queue.event_seq is 'The event: events.seq. Null: a test, which is no event.';
comment on column queue.attempts is 'Attempts that are over.';
comment on column queue.due_at is 'When the next attempt is due.';
comment on column queue.turn is '0: first attempt. 1: retry. 2: request.';

create table leases (
    webhook_id text not null,
    token uuid not null,
    until timestamptz not null,
    delivery_ids bigint[] not null,
    resend_ids bigint[] not null default '{}',
    primary key (webhook_id, token)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);
comment on table leases is
    'Deliveries or requests of one webhook that one claim took and that are not settled. A row counts until it is deleted, also '
    'when its time is over: deleting it makes its deliveries due again. A delivery that is parked, cancelled or '
    'delivered while leased leaves the queue at once; the lease stays until the attempt is settled, so that its result '
    'is kept.';
comment on column leases.webhook_id is 'The webhook.';
comment on column leases.token is 'Random for each claim. Every later write proves it.';
comment on column leases.until is 'When the lease ends.';
comment on column leases.delivery_ids is 'The deliveries: deliveries.id.';
comment on column leases.resend_ids is 'The requests: resends.id. A lease has either of the two.';

create table due_webhooks (
    webhook_id text collate "C" not null,
    due_at timestamptz
) with (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);
create index due_webhooks_now on due_webhooks (webhook_id) where due_at is null;
create index due_webhooks_later on due_webhooks (due_at, webhook_id) where due_at is not null;
comment on table due_webhooks is
    'Webhooks that may have something to claim, so that a claim visits these only. Every statement that makes a '
    'delivery claimable adds a row, so no writer waits for another: triggers on `queue` and `webhooks`, and the '
    'statements that delete leases. A claim removes the rows of the webhooks that it visits and for which nothing is '
    'left; it reads a row and what it stands for in one snapshot. A webhook with something in its queue has a row, or '
    'all its slots are leased. A superfluous row costs one visit.';
comment on column due_webhooks.webhook_id is 'The webhook. Ordered by its bytes.';
comment on column due_webhooks.due_at is 'From when on. Null: now.';

create function mark_queued() returns trigger
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
comment on function mark_queued() is
    'Trigger: add rows of due_webhooks for deliveries that were added to the queue or rescheduled.';

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
comment on function mark_webhook() is 'Trigger: add a row of due_webhooks for a webhook that became claimable.';

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

create table flag_changes (
    id bigint generated always as identity primary key,
    webhook_id text not null,
    switched_on boolean not null,
    made_at timestamptz not null default db_now()
);
create index flag_changes_of_webhook on flag_changes (webhook_id, id);
comment on table flag_changes is
    'One row for each transaction that switched a webhook on or off, or deleted it. The flags hold at once; the states '
    'of its pending deliveries follow in batches, and the last batch removes the rows that the first one saw. While '
    'there is a row, deliveries of the webhook may still be `scheduled` or `parked`.';
comment on column flag_changes.id is 'Internal number.';
comment on column flag_changes.webhook_id is 'The webhook.';
comment on column flag_changes.switched_on is 'True: switched on, so what waits for a retry becomes due.';
comment on column flag_changes.made_at is 'When the flags were changed.';

-- Finished attempts and claims are passed as one value of a composite type each.

create type settlement as (
    id bigint,
    webhook_id text,
    lease uuid,
    number integer,
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
    after_webhook text,
    per_unproven integer,
    proven text[],
    limited text[],
    limits integer[],
    closed_accounts text[]
);

comment on type settlement is 'One finished attempt and the state of its delivery that follows.';
comment on column settlement.id is 'The delivery: deliveries.id.';
comment on column settlement.webhook_id is 'Its webhook.';
comment on column settlement.lease is 'The token under which it was claimed: leases.token.';
comment on column settlement.number is 'As attempts.number.';
comment on column settlement.state is 'As deliveries.state.';
comment on column settlement.after_s is 'With state `scheduled`: seconds until the next attempt. Else null.';
comment on column settlement.started_at is 'As attempts.started_at.';
comment on column settlement.duration_ms is 'As attempts.duration_ms, in milliseconds.';
comment on column settlement.status is 'As attempts.status.';
comment on column settlement.error is 'As attempts.error.';
comment on column settlement.excerpt is 'As attempts.excerpt.';
comment on column settlement.address is 'As attempts.address.';
comment on column settlement.dns_ms is 'As attempts.dns_ms, in milliseconds.';
comment on column settlement.connect_ms is 'As attempts.connect_ms, in milliseconds.';
comment on column settlement.tls_ms is 'As attempts.tls_ms, in milliseconds.';
comment on column settlement.first_byte_ms is 'As attempts.first_byte_ms, in milliseconds.';
comment on type claim_request is 'What one claim may take.';
comment on column claim_request.wanted is 'Number of deliveries, at most.';
comment on column claim_request.lease is 'The token of the leases that the claim makes.';
comment on column claim_request.lease_s is 'Duration of these leases, in seconds.';
comment on column claim_request.per_webhook is 'Slots of a webhook that `limited` does not name.';
comment on column claim_request.after_webhook is 'The webhook that the last claim ended with.';
comment on column claim_request.per_unproven is 'Slots, at most, of a webhook that `proven` does not name.';
comment on column claim_request.proven is 'Webhooks that have answered promptly.';
comment on column claim_request.limited is 'Webhooks with other slots than `per_webhook`.';
comment on column claim_request.limits is 'Slots of these webhooks, in the same order.';
comment on column claim_request.closed_accounts is 'Accounts that get nothing.';

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

comment on function settle_deliveries is
    'Write finished attempts, given in the order of their ids, and what became of their deliveries; return the '
    'deliveries that were no longer leased, for which nothing is written. With `unless_failing` nothing is written and '
    'the result is null if one of the webhooks has failures to reset, which needs its row locked first, and the caller '
    'adds the rows of due_webhooks.';

-- Claims take turns, lest two of them count the same free slots of a webhook: the lock is taken before the snapshot of
-- the statement that counts. The settings hold the plan to the indexes, whatever the tables looked like when it was
-- made. Webhooks take turns in the order of the bytes of their ids, as the caller compares them; indexes of other
-- tables are used only with the default collation.
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

comment on function claim_due is
    'Lease up to `wanted` due deliveries until `lease_s` seconds from now. Webhooks take turns, beginning after '
    '`after_webhook`; each gets its free slots: `per_webhook`, or those that `limited` and `limits` name for it. A '
    'webhook that has been parked has one slot until its failures are forgotten, for the oldest due retry, else a '
    'first attempt. Otherwise first attempts go before retries. Webhooks that are not `proven` have at most '
    '`per_unproven` slots; those of the accounts `closed` have none.';

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

comment on function settle_and_claim is
    'Settle and claim in one round trip and one commit: the claim uses the slots that the settle frees. The first row '
    'has the deliveries that were no longer leased; if that is null, nothing was done (`unless_failing`). The queue of '
    'the settled webhooks is read after the lock of claims is taken, so no claim runs that counted the slots that end '
    'here.';

-- Requests for one more attempt. What waits has a row in `queue`.

create table resends (
    id bigint generated always as identity primary key,
    webhook_id text not null,
    event_seq bigint,
    event_id text not null,
    body bytea,
    requested_at timestamptz not null default db_now(),
    lease uuid,
    started_at timestamptz,
    duration_ms integer,
    status smallint,
    error text,
    excerpt text,
    address text,
    dns_ms integer,
    connect_ms integer,
    tls_ms integer,
    first_byte_ms integer,
    finished_at timestamptz,
    check ((event_seq is null) = (body is not null)),
    check ((finished_at is null) = (started_at is null))
);
create index resends_of_event on resends (webhook_id, event_seq);
comment on table resends is
    'Requests of accounts: resends, recoveries and tests. A row is one request for one attempt, and afterwards its '
    'result. It is never retried and does not count towards the health of the webhook. No foreign keys: one statement '
    'writes it from the webhook and the event.';
comment on column resends.id is 'Internal number.';
comment on column resends.webhook_id is 'The webhook.';
comment on column resends.event_seq is 'The event: events.seq. Null: a test, which is no event.';
comment on column resends.event_id is 'Sent as `webhook-id`.';
comment on column resends.body is 'Body of a test. Null: an event has its own.';
comment on column resends.requested_at is 'When it was requested.';
comment on column resends.lease is 'Token of the lease while the attempt is under way. Null: not claimed.';
comment on column resends.started_at is
    'As attempts.started_at. Null until the attempt is over, as the columns after it.';
comment on column resends.duration_ms is 'As attempts.duration_ms, in milliseconds.';
comment on column resends.status is 'As attempts.status.';
comment on column resends.error is 'As attempts.error.';
comment on column resends.excerpt is 'As attempts.excerpt.';
comment on column resends.address is 'As attempts.address.';
comment on column resends.dns_ms is 'As attempts.dns_ms, in milliseconds.';
comment on column resends.connect_ms is 'As attempts.connect_ms, in milliseconds.';
comment on column resends.tls_ms is 'As attempts.tls_ms, in milliseconds.';
comment on column resends.first_byte_ms is 'As attempts.first_byte_ms, in milliseconds.';
comment on column resends.finished_at is 'When the result was written. Null: waiting or leased.';

-- Notices to the operator.

create table notices (
    id uuid primary key default gen_random_uuid(),
    kind text not null check (
        kind in ('webhook_failing', 'webhook_disabled', 'delivery_exhausted', 'webhook_enabled', 'logs_quarantined')),
    webhook_id text references webhooks (id) on delete cascade,
    reason text check (reason in ('failing', 'gone')),
    count integer not null default 1 check (count > 0),
    failures integer not null,
    failing_since timestamptz,
    created_at timestamptz not null default db_now(),
    attempts integer not null default 0,
    due_at timestamptz not null default db_now(),
    lease uuid,
    finished_at timestamptz,
    sent boolean not null default false,
    address bytea check (octet_length(address) = 20),
    block_number bigint,
    check ((reason is not null) = (kind = 'webhook_disabled')),
    constraint notices_about_check check (
        (webhook_id is null) = (kind = 'logs_quarantined')
        and (address is not null) = (kind = 'logs_quarantined')
        and (block_number is not null) = (kind = 'logs_quarantined'))
);
create index notices_waiting on notices (due_at) where finished_at is null;
create index notices_finished on notices (finished_at) where finished_at is not null;
comment on table notices is
    'Notices to the operator, written in the transaction of the change that they report. Claimed under a lease, as '
    'deliveries are.';
comment on column notices.id is 'Sent as `webhook-id`, the same at every attempt.';
comment on column notices.kind is 'What happened.';
comment on column notices.webhook_id is 'The webhook concerned. Null: quarantined logs.';
comment on column notices.reason is 'Why a webhook was disabled: `failing`, or `gone` (it answered 410).';
comment on column notices.count is 'Exhausted deliveries, or quarantined logs, that this notice reports together.';
comment on column notices.failures is 'Value of webhooks.failures at that time.';
comment on column notices.failing_since is 'Value of webhooks.first_failure_at at that time.';
comment on column notices.created_at is 'When it happened.';
comment on column notices.attempts is 'Claims so far.';
comment on column notices.due_at is 'When the next attempt is due. While leased: when the lease ends.';
comment on column notices.lease is 'Random for each claim. Null: not claimed.';
comment on column notices.finished_at is 'When it was accepted, or cancelled. Null: waiting or leased.';
comment on column notices.sent is 'True: accepted by the operator''s webhook.';
comment on column notices.address is 'Contract whose logs were quarantined, 20 bytes. Null: about a webhook.';
comment on column notices.block_number is 'Execution block of the first of these logs. Null: about a webhook.';
