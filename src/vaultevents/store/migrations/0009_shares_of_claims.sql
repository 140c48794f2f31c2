-- A claim gives each webhook a share, so that a webhook with one delivery does not wait for many claims of others.

create or replace function claim_due(request claim_request)
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
    share integer;
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
    select greatest(wanted / greatest(count(distinct ready.webhook_id), 1), 32) into share
        from (select d.webhook_id from due_webhooks d where d.due_at is null order by d.webhook_id limit 64) ready;
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
                then greatest(least(open.slots - flight.number, wanted - v.taken, share), 0) else 0 end as number
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
    '`after_webhook`; each gets its free slots: `per_webhook`, or those that `limited` and `limits` name for it, and at '
    'most its share of the claim: `wanted` by the number of webhooks with something due, 32 at least. A '
    'webhook that has been parked has one slot until its failures are forgotten, for the oldest due retry, else a '
    'first attempt. Otherwise first attempts go before retries. Webhooks that are not `proven` have at most '
    '`per_unproven` slots; those of the accounts `closed` have none.';
