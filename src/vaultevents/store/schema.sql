-- The present schema. Generated from the migrations by `python3 dev.py schema`; do not edit.

CREATE SCHEMA vaultevents;
CREATE TYPE vaultevents.claim_request AS (
	wanted integer,
	lease uuid,
	lease_s double precision,
	per_webhook integer,
	after_webhook text,
	per_unproven integer,
	proven text[],
	limited text[],
	limits integer[],
	closed_accounts text[]
);
COMMENT ON TYPE vaultevents.claim_request IS 'What one claim may take.';
COMMENT ON COLUMN vaultevents.claim_request.wanted IS 'Number of deliveries, at most.';
COMMENT ON COLUMN vaultevents.claim_request.lease IS 'The token of the leases that the claim makes.';
COMMENT ON COLUMN vaultevents.claim_request.lease_s IS 'Duration of these leases, in seconds.';
COMMENT ON COLUMN vaultevents.claim_request.per_webhook IS 'Slots of a webhook that `limited` does not name.';
COMMENT ON COLUMN vaultevents.claim_request.after_webhook IS 'The webhook that the last claim ended with.';
COMMENT ON COLUMN vaultevents.claim_request.per_unproven IS 'Slots, at most, of a webhook that `proven` does not name.';
COMMENT ON COLUMN vaultevents.claim_request.proven IS 'Webhooks that have answered promptly.';
COMMENT ON COLUMN vaultevents.claim_request.limited IS 'Webhooks with other slots than `per_webhook`.';
COMMENT ON COLUMN vaultevents.claim_request.limits IS 'Slots of these webhooks, in the same order.';
COMMENT ON COLUMN vaultevents.claim_request.closed_accounts IS 'Accounts that get nothing.';
CREATE TYPE vaultevents.settlement AS (
	id bigint,
	webhook_id text,
	lease uuid,
	number integer,
	state text,
	after_s double precision,
	started_at timestamp with time zone,
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
COMMENT ON TYPE vaultevents.settlement IS 'One finished attempt and the state of its delivery that follows.';
COMMENT ON COLUMN vaultevents.settlement.id IS 'The delivery: deliveries.id.';
COMMENT ON COLUMN vaultevents.settlement.webhook_id IS 'Its webhook.';
COMMENT ON COLUMN vaultevents.settlement.lease IS 'The token under which it was claimed: leases.token.';
COMMENT ON COLUMN vaultevents.settlement.number IS 'As attempts.number.';
COMMENT ON COLUMN vaultevents.settlement.state IS 'As deliveries.state.';
COMMENT ON COLUMN vaultevents.settlement.after_s IS 'With state `scheduled`: seconds until the next attempt. Else null.';
COMMENT ON COLUMN vaultevents.settlement.started_at IS 'As attempts.started_at.';
COMMENT ON COLUMN vaultevents.settlement.duration_ms IS 'As attempts.duration_ms, in milliseconds.';
COMMENT ON COLUMN vaultevents.settlement.status IS 'As attempts.status.';
COMMENT ON COLUMN vaultevents.settlement.error IS 'As attempts.error.';
COMMENT ON COLUMN vaultevents.settlement.excerpt IS 'As attempts.excerpt.';
COMMENT ON COLUMN vaultevents.settlement.address IS 'As attempts.address.';
COMMENT ON COLUMN vaultevents.settlement.dns_ms IS 'As attempts.dns_ms, in milliseconds.';
COMMENT ON COLUMN vaultevents.settlement.connect_ms IS 'As attempts.connect_ms, in milliseconds.';
COMMENT ON COLUMN vaultevents.settlement.tls_ms IS 'As attempts.tls_ms, in milliseconds.';
COMMENT ON COLUMN vaultevents.settlement.first_byte_ms IS 'As attempts.first_byte_ms, in milliseconds.';

CREATE FUNCTION vaultevents.append_audit_entry(new_actor text, new_action text, new_subject text, new_account text, new_before bytea, new_after bytea) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'vaultevents', 'pg_temp'
    AS $$
declare
    entry audit_log;
begin
    if current_setting('role') = 'vaultevents_api'
        and new_account is distinct from current_setting('vaultevents.account', true) then
        raise exception 'an entry of the API is about the account of its session';
    end if;
    perform pg_advisory_xact_lock(hashtext('vaultevents audit log'), hashtext(current_schema()));
    select seq, hash into entry.seq, entry.previous_hash from audit_log order by seq desc limit 1;
    entry.seq := coalesce(entry.seq, 0) + 1;
    entry.previous_hash := coalesce(entry.previous_hash, decode(repeat('00', 32), 'hex'));
    entry.at := db_now();
    entry.hash := sha256(
        audit_field(entry.previous_hash)
        || audit_field(convert_to(entry.seq::text, 'UTF8'))
        || audit_field(convert_to(to_char(entry.at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), 'UTF8'))
        || audit_field(convert_to(new_actor, 'UTF8'))
        || audit_field(convert_to(new_action, 'UTF8'))
        || audit_field(convert_to(new_subject, 'UTF8'))
        || audit_field(convert_to(new_account, 'UTF8'))
        || audit_field(new_before)
        || audit_field(new_after));
    insert into audit_log (seq, at, actor, action, subject, account_id, before_digest, after_digest, previous_hash, hash)
        values (entry.seq, entry.at, new_actor, new_action, new_subject, new_account, new_before, new_after,
            entry.previous_hash, entry.hash);
    return entry.seq;
end $$;
COMMENT ON FUNCTION vaultevents.append_audit_entry(new_actor text, new_action text, new_subject text, new_account text, new_before bytea, new_after bytea) IS 'Append an entry to the audit log and return its number. Locks the log until the transaction ends, so that the chain has one end: call it last. Runs as the owner of the tables, so that the API role can append and neither read nor change.';

CREATE FUNCTION vaultevents.audit_field(content bytea) RETURNS bytea
    LANGUAGE sql IMMUTABLE
    AS $$select coalesce(int4send(octet_length(content)) || content, '\xffffffff'::bytea)$$;
COMMENT ON FUNCTION vaultevents.audit_field(content bytea) IS 'Encode a field of an audit log entry for its hash: the number of its bytes in 4 bytes, big-endian, then the bytes. Null: ff ff ff ff.';

CREATE FUNCTION vaultevents.claim_due(request vaultevents.claim_request) RETURNS TABLE(delivery_id bigint, attempts integer, event_id text, body bytea, webhook_id text, account_id text, url text, key_ids text[], sealed bytea[], claimed_at timestamp with time zone)
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $$
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
COMMENT ON FUNCTION vaultevents.claim_due(request vaultevents.claim_request) IS 'Lease up to `wanted` due deliveries until `lease_s` seconds from now. Webhooks take turns, beginning after `after_webhook`; each gets its free slots: `per_webhook`, or those that `limited` and `limits` name for it, and at most its share of the claim: `wanted` by the number of webhooks with something due, 32 at least. A webhook that has been parked has one slot until its failures are forgotten, for the oldest due retry, else a first attempt. Otherwise first attempts go before retries. Webhooks that are not `proven` have at most `per_unproven` slots; those of the accounts `closed` have none.';

CREATE FUNCTION vaultevents.count_rows() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
declare
    change bigint;
    entry bigint;
begin
    case tg_op
        when 'TRUNCATE' then
            select -coalesce(sum(difference), 0) from row_totals where counted = tg_table_name into change;
        when 'INSERT' then select count(*) from changed into change;
        else select -count(*) from changed into change;
    end case;
    if change = 0 then
        return null;
    end if;
    insert into row_totals (counted, difference) values (tg_table_name, change) returning id into entry;
    if entry % 64 = 0 then
        with replaced as (
            delete from row_totals where id in (select id from row_totals order by id limit 1000 for update skip locked)
            returning counted, difference
        )
        insert into row_totals (counted, difference)
            select counted, sum(difference) from replaced group by counted having sum(difference) <> 0;
    end if;
    return null;
end $$;
COMMENT ON FUNCTION vaultevents.count_rows() IS 'Trigger: add the difference of one statement to row_totals.';

CREATE FUNCTION vaultevents.db_now() RETURNS timestamp with time zone
    LANGUAGE sql
    AS $$select clock_timestamp()$$;
COMMENT ON FUNCTION vaultevents.db_now() IS 'The clock of every schedule and lease. Tests replace it.';

CREATE FUNCTION vaultevents.mark_queued() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'vaultevents', 'pg_temp'
    AS $$
declare
    moment timestamptz := db_now();
begin
    insert into due_webhooks (webhook_id, due_at)
        select c.webhook_id, case when min(c.due_at) > moment then min(c.due_at) end
        from changed c where c.delivery_id is not null group by c.webhook_id;
    return null;
end $$;
COMMENT ON FUNCTION vaultevents.mark_queued() IS 'Trigger: add rows of due_webhooks for deliveries that were added to the queue or rescheduled.';

CREATE FUNCTION vaultevents.mark_webhook() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'vaultevents', 'pg_temp'
    AS $$
begin
    insert into due_webhooks (webhook_id) values (new.id);
    return null;
end $$;
COMMENT ON FUNCTION vaultevents.mark_webhook() IS 'Trigger: add a row of due_webhooks for a webhook that became claimable.';

CREATE FUNCTION vaultevents.recount_rows() RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    lock table events, deliveries in share row exclusive mode;
    delete from row_totals;
    insert into row_totals (counted, difference)
        select 'events', count(*) from events union all select 'deliveries', count(*) from deliveries;
end $$;
COMMENT ON FUNCTION vaultevents.recount_rows() IS 'Count events and deliveries again. For a database whose rows were copied with its triggers off. Writers wait.';

CREATE FUNCTION vaultevents.refuse_audit_change() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
begin
    raise exception 'the audit log is append-only: nothing of it is changed or removed';
end $$;
COMMENT ON FUNCTION vaultevents.refuse_audit_change() IS 'Trigger: refuse every change of the audit log but an append.';

CREATE FUNCTION vaultevents.replace_secret(webhook text, new_key_id text, new_sealed bytea, overlap_s double precision) RETURNS timestamp with time zone
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'vaultevents', 'pg_temp'
    AS $$
declare
    moment timestamptz := db_now();
    newest timestamptz;
begin
    if overlap_s is null or overlap_s not between 0 and 7 * 24 * 3600 then
        raise invalid_parameter_value using message = 'an overlap has 0 s to 7 days';
    end if;
    perform from webhooks w where w.id = webhook and w.deleted_at is null
        and w.account_id = current_setting('vaultevents.account', true) for update;
    if not found then
        return null;
    end if;
    select max(created_at) into newest from webhook_secrets where webhook_id = webhook;
    delete from webhook_secrets where webhook_id = webhook and (valid_until is not null or overlap_s = 0);
    update webhook_secrets set valid_until = moment + make_interval(secs => overlap_s) where webhook_id = webhook;
    -- the newest signs first, also after the clock was set back
    insert into webhook_secrets (webhook_id, key_id, sealed, created_at)
        values (webhook, new_key_id, new_sealed, greatest(moment, newest + interval '1 us'));
    return moment + make_interval(secs => overlap_s);
end $$;
COMMENT ON FUNCTION vaultevents.replace_secret(webhook text, new_key_id text, new_sealed bytea, overlap_s double precision) IS 'Give a webhook of the session''s account another secret. The present one stays valid for `overlap_s` seconds, at most a week; older ones are erased. Return until when the present one is valid; null: the account has no such webhook. Runs as the owner of the tables, so that the API role itself cannot keep a former secret valid.';

CREATE FUNCTION vaultevents.settle_and_claim(settlements vaultevents.settlement[], request vaultevents.claim_request) RETURNS TABLE(delivery_id bigint, attempts integer, event_id text, body bytea, webhook_id text, account_id text, url text, key_ids text[], sealed bytea[], claimed_at timestamp with time zone, lost bigint[])
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $$
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
COMMENT ON FUNCTION vaultevents.settle_and_claim(settlements vaultevents.settlement[], request vaultevents.claim_request) IS 'Settle and claim in one round trip and one commit: the claim uses the slots that the settle frees. The first row has the deliveries that were no longer leased; if that is null, nothing was done (`unless_failing`). The queue of the settled webhooks is read after the lock of claims is taken, so no claim runs that counted the slots that end here.';

CREATE FUNCTION vaultevents.settle_deliveries(settlements vaultevents.settlement[], unless_failing boolean) RETURNS bigint[]
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $$
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
COMMENT ON FUNCTION vaultevents.settle_deliveries(settlements vaultevents.settlement[], unless_failing boolean) IS 'Write finished attempts, given in the order of their ids, and what became of their deliveries; return the deliveries that were no longer leased, for which nothing is written. With `unless_failing` nothing is written and the result is null if one of the webhooks has failures to reset, which needs its row locked first, and the caller adds the rows of due_webhooks.';

CREATE TABLE vaultevents.accounts (
    id text NOT NULL,
    name text NOT NULL,
    created_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    CONSTRAINT accounts_id_check CHECK ((id ~ '^[A-Za-z0-9-]{1,64}$'::text))
);
COMMENT ON TABLE vaultevents.accounts IS 'Customers. Vaults, events and webhooks belong to one account each.';
COMMENT ON COLUMN vaultevents.accounts.id IS 'Chosen by the operator.';
COMMENT ON COLUMN vaultevents.accounts.name IS 'Name for display.';
COMMENT ON COLUMN vaultevents.accounts.created_at IS 'When the account was registered.';

CREATE TABLE vaultevents.api_key_uses (
    api_key_id text NOT NULL,
    used_at timestamp with time zone NOT NULL
);
COMMENT ON TABLE vaultevents.api_key_uses IS 'When API keys were last used. Written once a minute by each API process, apart from api_keys, so that neither caches nor the audit log see a change of the key.';
COMMENT ON COLUMN vaultevents.api_key_uses.api_key_id IS 'The API key.';
COMMENT ON COLUMN vaultevents.api_key_uses.used_at IS 'When the API last accepted a request with it.';

CREATE TABLE vaultevents.api_keys (
    id text NOT NULL,
    account_id text NOT NULL,
    name text NOT NULL,
    role text NOT NULL,
    hash bytea NOT NULL,
    allowed text[],
    created_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    revoked_at timestamp with time zone,
    CONSTRAINT api_keys_allowed_check CHECK ((cardinality(allowed) > 0)),
    CONSTRAINT api_keys_hash_check CHECK ((octet_length(hash) = 32)),
    CONSTRAINT api_keys_role_check CHECK ((role = ANY (ARRAY['read'::text, 'manage'::text])))
);
COMMENT ON TABLE vaultevents.api_keys IS 'Keys of the HTTP API.';
COMMENT ON COLUMN vaultevents.api_keys.id IS 'Public id.';
COMMENT ON COLUMN vaultevents.api_keys.account_id IS 'Account for which it is valid.';
COMMENT ON COLUMN vaultevents.api_keys.name IS 'Name for display.';
COMMENT ON COLUMN vaultevents.api_keys.role IS '`read`, or `manage`: may also change webhooks.';
COMMENT ON COLUMN vaultevents.api_keys.hash IS 'HMAC-SHA256 of the key under hash_key, 32 bytes.';
COMMENT ON COLUMN vaultevents.api_keys.allowed IS 'Networks in CIDR notation from which it may be used. Null: any.';
COMMENT ON COLUMN vaultevents.api_keys.created_at IS 'When it was created.';
COMMENT ON COLUMN vaultevents.api_keys.revoked_at IS 'When it was revoked. Null: valid.';

CREATE TABLE vaultevents.api_public_keys (
    api_key_id text NOT NULL,
    fingerprint text NOT NULL,
    der bytea NOT NULL,
    created_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    valid_until timestamp with time zone
);
COMMENT ON TABLE vaultevents.api_public_keys IS 'Public keys that verify the JWTs of an API key.';
COMMENT ON COLUMN vaultevents.api_public_keys.api_key_id IS 'The API key.';
COMMENT ON COLUMN vaultevents.api_public_keys.fingerprint IS '`SHA256:` and the digest of `der` in unpadded base64.';
COMMENT ON COLUMN vaultevents.api_public_keys.der IS 'SubjectPublicKeyInfo, DER.';
COMMENT ON COLUMN vaultevents.api_public_keys.created_at IS 'When it was added.';
COMMENT ON COLUMN vaultevents.api_public_keys.valid_until IS 'Null: until the API key is revoked.';

CREATE TABLE vaultevents.attempts (
    delivery_id bigint NOT NULL,
    number integer NOT NULL,
    started_at timestamp with time zone NOT NULL,
    duration_ms integer NOT NULL,
    status smallint,
    error text,
    excerpt text NOT NULL,
    address text,
    dns_ms integer,
    connect_ms integer,
    tls_ms integer,
    first_byte_ms integer
);
COMMENT ON TABLE vaultevents.attempts IS 'POSTs of deliveries and what was answered. Append-only. No foreign key: a settle writes delivery and attempt at once.';
COMMENT ON COLUMN vaultevents.attempts.delivery_id IS 'The delivery: deliveries.id.';
COMMENT ON COLUMN vaultevents.attempts.number IS 'From 1, in order.';
COMMENT ON COLUMN vaultevents.attempts.started_at IS 'Start of the POST, by the clock of the process.';
COMMENT ON COLUMN vaultevents.attempts.duration_ms IS 'Whole duration, in milliseconds.';
COMMENT ON COLUMN vaultevents.attempts.status IS 'HTTP status. Null: no complete answer.';
COMMENT ON COLUMN vaultevents.attempts.error IS 'Why there is no complete answer. Null: there is a status.';
COMMENT ON COLUMN vaultevents.attempts.excerpt IS 'Beginning of the answer''s body.';
COMMENT ON COLUMN vaultevents.attempts.address IS 'IP address of the receiver. Null: none was resolved.';
COMMENT ON COLUMN vaultevents.attempts.dns_ms IS 'Name resolution, in milliseconds. Null: skipped or not reached, as in the columns after it.';
COMMENT ON COLUMN vaultevents.attempts.connect_ms IS 'TCP connection, in milliseconds.';
COMMENT ON COLUMN vaultevents.attempts.tls_ms IS 'TLS handshake, in milliseconds.';
COMMENT ON COLUMN vaultevents.attempts.first_byte_ms IS 'From the start of the attempt to the first byte of the answer, in milliseconds.';

CREATE TABLE vaultevents.audit_log (
    seq bigint NOT NULL,
    at timestamp with time zone NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    subject text NOT NULL,
    account_id text,
    before_digest bytea,
    after_digest bytea,
    previous_hash bytea NOT NULL,
    hash bytea NOT NULL,
    CONSTRAINT audit_log_action_check CHECK ((action ~ '^[a-z][a-z_]*(\.[a-z_]+)?$'::text)),
    CONSTRAINT audit_log_actor_check CHECK (((actor <> ''::text) AND (octet_length(actor) <= 200))),
    CONSTRAINT audit_log_after_digest_check CHECK ((octet_length(after_digest) = 32)),
    CONSTRAINT audit_log_before_digest_check CHECK ((octet_length(before_digest) = 32)),
    CONSTRAINT audit_log_hash_check CHECK ((octet_length(hash) = 32)),
    CONSTRAINT audit_log_previous_hash_check CHECK ((octet_length(previous_hash) = 32)),
    CONSTRAINT audit_log_subject_check CHECK ((octet_length(subject) <= 20000))
);
COMMENT ON TABLE vaultevents.audit_log IS 'Administrative acts. Append-only: each row is written in the transaction of its change, and links to the row before it. Rows refer to nothing, so that they outlive what they are about.';
COMMENT ON COLUMN vaultevents.audit_log.seq IS 'Number of the row, from 1 without a gap.';
COMMENT ON COLUMN vaultevents.audit_log.at IS 'When the act was recorded.';
COMMENT ON COLUMN vaultevents.audit_log.actor IS 'Who acted: `cli:` and the user of the operating system, `api:` and the API key''s id, `console:` and the session''s id, or `service`: automatic.';
COMMENT ON COLUMN vaultevents.audit_log.action IS 'What was done, such as `webhook.enable`.';
COMMENT ON COLUMN vaultevents.audit_log.subject IS 'What was changed, by its id.';
COMMENT ON COLUMN vaultevents.audit_log.account_id IS 'Account of the subject. Null: none, or several.';
COMMENT ON COLUMN vaultevents.audit_log.before_digest IS 'SHA-256 of the canonical JSON of the state before, without secrets. Null: there was none.';
COMMENT ON COLUMN vaultevents.audit_log.after_digest IS 'SHA-256 of the canonical JSON of the state afterwards, without secrets. Null: there is none.';
COMMENT ON COLUMN vaultevents.audit_log.previous_hash IS '`hash` of the row before. The first row: 32 zero bytes.';
COMMENT ON COLUMN vaultevents.audit_log.hash IS 'SHA-256 of previous_hash, seq, at, actor, action, subject, account_id, before_digest and after_digest, as audit_field() encodes each of them.';

CREATE TABLE vaultevents.console_links (
    digest bytea NOT NULL,
    made_by text NOT NULL,
    valid_until timestamp with time zone NOT NULL,
    CONSTRAINT console_links_digest_check CHECK ((octet_length(digest) = 32))
);
COMMENT ON TABLE vaultevents.console_links IS 'Links of `vaultevents console` that were not used yet. Each is exchanged once for a session.';
COMMENT ON COLUMN vaultevents.console_links.digest IS 'SHA-256 of the code in the link.';
COMMENT ON COLUMN vaultevents.console_links.made_by IS 'Who asked for it, as in the audit log.';
COMMENT ON COLUMN vaultevents.console_links.valid_until IS 'Until when it can be used.';

CREATE TABLE vaultevents.console_sessions (
    id text NOT NULL,
    digest bytea NOT NULL,
    made_by text NOT NULL,
    begun_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    valid_until timestamp with time zone NOT NULL,
    CONSTRAINT console_sessions_digest_check CHECK ((octet_length(digest) = 32))
);
COMMENT ON TABLE vaultevents.console_sessions IS 'Browsers that are logged in to the console.';
COMMENT ON COLUMN vaultevents.console_sessions.id IS 'Random name of the session. It is no secret.';
COMMENT ON COLUMN vaultevents.console_sessions.digest IS 'SHA-256 of the token in the browser''s cookie.';
COMMENT ON COLUMN vaultevents.console_sessions.made_by IS 'Who asked for the link, as in the audit log.';
COMMENT ON COLUMN vaultevents.console_sessions.begun_at IS 'When the link was used.';
COMMENT ON COLUMN vaultevents.console_sessions.valid_until IS 'When the session ends.';

CREATE TABLE vaultevents.cursors (
    id bigint NOT NULL,
    stream text NOT NULL,
    kind text NOT NULL,
    first bigint NOT NULL,
    "position" bigint NOT NULL,
    anchor text,
    stop bigint,
    updated_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    problem text,
    problem_since timestamp with time zone,
    rewinds bigint DEFAULT 0 NOT NULL,
    rewound_at timestamp with time zone,
    node text,
    unverified_from bigint,
    CONSTRAINT cursors_check CHECK (("position" >= (first - 1))),
    CONSTRAINT cursors_kind_check CHECK ((kind = ANY (ARRAY['live'::text, 'backfill'::text, 'replay'::text, 'audit'::text]))),
    CONSTRAINT cursors_node_check CHECK (((node IS NULL) OR (kind = 'audit'::text))),
    CONSTRAINT cursors_stop_check CHECK (((stop IS NULL) = (kind = ANY (ARRAY['live'::text, 'audit'::text]))))
);
COMMENT ON TABLE vaultevents.cursors IS 'How far each stream is read. Position and events are written in one transaction. Backfills, replays and audits have cursors of their own.';
COMMENT ON COLUMN vaultevents.cursors.id IS 'Internal number.';
COMMENT ON COLUMN vaultevents.cursors.stream IS 'Name of the stream. Its unit is a block or an epoch.';
COMMENT ON COLUMN vaultevents.cursors.kind IS '`live`: follows the chain. `backfill`, `replay`: a range that ends. `audit`: reads again what was read, one node at a time.';
COMMENT ON COLUMN vaultevents.cursors.first IS 'First block or epoch.';
COMMENT ON COLUMN vaultevents.cursors."position" IS 'Last block or epoch that is done.';
COMMENT ON COLUMN vaultevents.cursors.anchor IS 'Hash to which the next span must link. Null: none.';
COMMENT ON COLUMN vaultevents.cursors.stop IS 'Last block or epoch to read. Null: without an end.';
COMMENT ON COLUMN vaultevents.cursors.updated_at IS 'When the cursor last moved.';
COMMENT ON COLUMN vaultevents.cursors.problem IS 'Why the stream does not move, as in the log. Null: it moves.';
COMMENT ON COLUMN vaultevents.cursors.problem_since IS 'Since when there is a problem.';
COMMENT ON COLUMN vaultevents.cursors.rewinds IS 'How often a reorg moved the cursor back.';
COMMENT ON COLUMN vaultevents.cursors.rewound_at IS 'When a reorg last moved it back.';
COMMENT ON COLUMN vaultevents.cursors.node IS 'Redacted name of the execution node that an audit asks. Null: no particular node.';
COMMENT ON COLUMN vaultevents.cursors.unverified_from IS 'First block of a row whose headers or receipts have a form that this version does not know. Null: none.';
ALTER TABLE vaultevents.cursors ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME vaultevents.cursors_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE vaultevents.deliveries (
    id bigint NOT NULL,
    event_seq bigint NOT NULL,
    webhook_id text NOT NULL,
    state text NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    created_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    finished_at timestamp with time zone,
    apart text GENERATED ALWAYS AS (NULLIF(NULLIF(state, 'scheduled'::text), 'delivered'::text)) STORED,
    recovered boolean DEFAULT false NOT NULL,
    CONSTRAINT deliveries_state_check CHECK ((state = ANY (ARRAY['scheduled'::text, 'parked'::text, 'delivered'::text, 'exhausted'::text, 'cancelled'::text, 'withdrawn'::text])))
)
WITH (fillfactor='45');
COMMENT ON TABLE vaultevents.deliveries IS 'Event × webhook: one row for each that matched when the event was committed, and what became of it.';
COMMENT ON COLUMN vaultevents.deliveries.id IS 'Internal number.';
COMMENT ON COLUMN vaultevents.deliveries.event_seq IS 'The event: events.seq.';
COMMENT ON COLUMN vaultevents.deliveries.webhook_id IS 'The webhook.';
COMMENT ON COLUMN vaultevents.deliveries.state IS 'scheduled: in the queue. parked: its webhook is off. delivered: answered with 2xx. exhausted: every attempt failed. cancelled: its webhook was deleted. withdrawn: the event was orphaned before it was sent.';
COMMENT ON COLUMN vaultevents.deliveries.attempts IS 'Attempts that are over.';
COMMENT ON COLUMN vaultevents.deliveries.created_at IS 'When the delivery was created.';
COMMENT ON COLUMN vaultevents.deliveries.finished_at IS 'When it reached its last state. Null while it may still be attempted.';
COMMENT ON COLUMN vaultevents.deliveries.apart IS '`state`, null for scheduled and delivered. A success therefore changes no indexed column and rewrites no index.';
COMMENT ON COLUMN vaultevents.deliveries.recovered IS 'Created by the result of a resend: the event had not matched when it was committed.';
ALTER TABLE vaultevents.deliveries ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME vaultevents.deliveries_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE vaultevents.deposit_searches (
    id bigint NOT NULL,
    vaults bytea[] NOT NULL,
    "position" bigint NOT NULL,
    anchor bytea,
    next_deposit bigint,
    last_deposit_block bigint,
    CONSTRAINT deposit_searches_anchor_check CHECK ((octet_length(anchor) = 32))
);
COMMENT ON TABLE vaultevents.deposit_searches IS 'How far the deposits of registered vaults were read, where the beacon node does not give all validators.';
COMMENT ON COLUMN vaultevents.deposit_searches.id IS 'Search id.';
COMMENT ON COLUMN vaultevents.deposit_searches.vaults IS 'Addresses whose deposits are looked for.';
COMMENT ON COLUMN vaultevents.deposit_searches."position" IS 'Last block that was read.';
COMMENT ON COLUMN vaultevents.deposit_searches.anchor IS 'Hash of that block. Null: not known.';
COMMENT ON COLUMN vaultevents.deposit_searches.next_deposit IS 'Index of the next deposit of the deposit contract, of which none may be missing. Null: none was seen.';
COMMENT ON COLUMN vaultevents.deposit_searches.last_deposit_block IS 'Block of the deposit before it. Null: none was seen.';
ALTER TABLE vaultevents.deposit_searches ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME vaultevents.deposit_searches_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE vaultevents.deposits (
    pubkey bytea NOT NULL,
    vault bytea NOT NULL,
    block_number bigint NOT NULL,
    CONSTRAINT deposits_pubkey_check CHECK ((octet_length(pubkey) = 48)),
    CONSTRAINT deposits_vault_check CHECK ((octet_length(vault) = 20))
);
COMMENT ON TABLE vaultevents.deposits IS 'Public keys that were deposited for registered vaults. Whether such a validator pays its vault is in `validators`.';
COMMENT ON COLUMN vaultevents.deposits.pubkey IS 'BLS public key, 48 bytes.';
COMMENT ON COLUMN vaultevents.deposits.vault IS 'Address in the withdrawal credentials of the deposit.';
COMMENT ON COLUMN vaultevents.deposits.block_number IS 'Block of the first deposit.';

CREATE TABLE vaultevents.discovery (
    singleton boolean DEFAULT true NOT NULL,
    registry_size bigint DEFAULT 0 NOT NULL,
    known_through bigint,
    scanned_at timestamp with time zone,
    scanned_vaults bytea[] DEFAULT '{}'::bytea[] NOT NULL,
    problem text,
    source text DEFAULT 'list'::text NOT NULL,
    list_refused text,
    CONSTRAINT discovery_singleton_check CHECK (singleton),
    CONSTRAINT discovery_source_check CHECK ((source = ANY (ARRAY['list'::text, 'deposits'::text])))
);
COMMENT ON TABLE vaultevents.discovery IS 'Progress of the search for validators of registered vaults.';
COMMENT ON COLUMN vaultevents.discovery.singleton IS 'Always true.';
COMMENT ON COLUMN vaultevents.discovery.registry_size IS 'Validators of the whole network that were examined.';
COMMENT ON COLUMN vaultevents.discovery.known_through IS 'Epoch of the finalized block at the last refresh: every activation and exit up to four epochs later is in `validators`. Null: never refreshed.';
COMMENT ON COLUMN vaultevents.discovery.scanned_at IS 'When all validators were last examined.';
COMMENT ON COLUMN vaultevents.discovery.scanned_vaults IS 'Addresses for which they were examined.';
COMMENT ON COLUMN vaultevents.discovery.problem IS 'What delays discovery, and with it the streams. Null: nothing.';
COMMENT ON COLUMN vaultevents.discovery.source IS 'Where validators are found: the list of all validators, or deposits.';
COMMENT ON COLUMN vaultevents.discovery.list_refused IS 'How a beacon node refused the list. Null: it did not, or was not asked.';

CREATE TABLE vaultevents.due_webhooks (
    webhook_id text NOT NULL COLLATE pg_catalog."C",
    due_at timestamp with time zone
)
WITH (fillfactor='90', autovacuum_vacuum_scale_factor='0.1', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0');
COMMENT ON TABLE vaultevents.due_webhooks IS 'Webhooks that may have something to claim, so that a claim visits these only. Every statement that makes a delivery claimable adds a row, so no writer waits for another: triggers on `queue` and `webhooks`, and the statements that delete leases. A claim removes the rows of the webhooks that it visits and for which nothing is left; it reads a row and what it stands for in one snapshot. A webhook with something in its queue has a row, or all its slots are leased. A superfluous row costs one visit.';
COMMENT ON COLUMN vaultevents.due_webhooks.webhook_id IS 'The webhook. Ordered by its bytes.';
COMMENT ON COLUMN vaultevents.due_webhooks.due_at IS 'From when on. Null: now.';

CREATE TABLE vaultevents.events (
    seq bigint NOT NULL,
    account_id text NOT NULL,
    id text NOT NULL,
    vault_id text NOT NULL,
    event_type text NOT NULL,
    block_number bigint,
    created_at_ms bigint NOT NULL,
    encoding smallint NOT NULL,
    body bytea NOT NULL,
    suppressed boolean NOT NULL,
    filter_revision bigint NOT NULL,
    committed_xid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    stored_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    near_head boolean DEFAULT false NOT NULL,
    orphaned_at timestamp with time zone
);
COMMENT ON TABLE vaultevents.events IS 'The outbox: every event, as it is delivered. A row is written once; only `orphaned_at` changes.';
COMMENT ON COLUMN vaultevents.events.seq IS 'Internal number. Not a cursor: a later number may commit first.';
COMMENT ON COLUMN vaultevents.events.account_id IS 'Account of the vault.';
COMMENT ON COLUMN vaultevents.events.id IS 'Event id, a hash of what the chain says. Sent as `webhook-id`.';
COMMENT ON COLUMN vaultevents.events.vault_id IS 'The vault.';
COMMENT ON COLUMN vaultevents.events.event_type IS 'Event type, as in the body.';
COMMENT ON COLUMN vaultevents.events.block_number IS 'Execution block. Null: the event has a time only (activation, exit).';
COMMENT ON COLUMN vaultevents.events.created_at_ms IS 'When it happened on the chain: Unix time, in milliseconds.';
COMMENT ON COLUMN vaultevents.events.encoding IS 'Version of the body''s template and of the order of its keys.';
COMMENT ON COLUMN vaultevents.events.body IS 'Exactly the bytes that are POSTed.';
COMMENT ON COLUMN vaultevents.events.suppressed IS 'True: stored and delivered to no webhook (see vault_spans.deliver_from).';
COMMENT ON COLUMN vaultevents.events.filter_revision IS 'Value of registry.filter_revision at the commit: the filters that decided.';
COMMENT ON COLUMN vaultevents.events.committed_xid IS 'Transaction that stored it. The feed runs in this order.';
COMMENT ON COLUMN vaultevents.events.stored_at IS 'When it was stored.';
COMMENT ON COLUMN vaultevents.events.near_head IS 'True: first seen above the finalized block.';
COMMENT ON COLUMN vaultevents.events.orphaned_at IS 'When its log was removed from the chain by a reorg. Null: it is on the chain.';
ALTER TABLE vaultevents.events ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME vaultevents.events_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE vaultevents.feed (
    singleton boolean DEFAULT true NOT NULL,
    epoch integer DEFAULT 1 NOT NULL,
    CONSTRAINT feed_singleton_check CHECK (singleton)
);
COMMENT ON TABLE vaultevents.feed IS 'The events feed runs in the order of events.committed_xid.';
COMMENT ON COLUMN vaultevents.feed.singleton IS 'Always true.';
COMMENT ON COLUMN vaultevents.feed.epoch IS 'Rises when events come from another server, whose transaction ids mean nothing here.';

CREATE TABLE vaultevents.flag_changes (
    id bigint NOT NULL,
    webhook_id text NOT NULL,
    switched_on boolean NOT NULL,
    made_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL
);
COMMENT ON TABLE vaultevents.flag_changes IS 'One row for each transaction that switched a webhook on or off, or deleted it. The flags hold at once; the states of its pending deliveries follow in batches, and the last batch removes the rows that the first one saw. While there is a row, deliveries of the webhook may still be `scheduled` or `parked`.';
COMMENT ON COLUMN vaultevents.flag_changes.id IS 'Internal number.';
COMMENT ON COLUMN vaultevents.flag_changes.webhook_id IS 'The webhook.';
COMMENT ON COLUMN vaultevents.flag_changes.switched_on IS 'True: switched on, so what waits for a retry becomes due.';
COMMENT ON COLUMN vaultevents.flag_changes.made_at IS 'When the flags were changed.';
ALTER TABLE vaultevents.flag_changes ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME vaultevents.flag_changes_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE vaultevents.hash_key (
    singleton boolean DEFAULT true NOT NULL,
    key_id text NOT NULL,
    sealed bytea NOT NULL,
    CONSTRAINT hash_key_singleton_check CHECK (singleton)
);
COMMENT ON TABLE vaultevents.hash_key IS 'The random key under which API keys are hashed. It is sealed, so that the master key can change and no API key has to.';
COMMENT ON COLUMN vaultevents.hash_key.singleton IS 'Always true.';
COMMENT ON COLUMN vaultevents.hash_key.key_id IS 'Id of the master key that seals it.';
COMMENT ON COLUMN vaultevents.hash_key.sealed IS 'The key, AES-256-GCM. Associated data: ''hash key''.';

CREATE TABLE vaultevents.health_probe (
    singleton boolean DEFAULT true NOT NULL,
    written_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    CONSTRAINT health_probe_singleton_check CHECK (singleton)
)
WITH (fillfactor='10');
COMMENT ON TABLE vaultevents.health_probe IS 'Written by every process that reports its health: a database that cannot write is not healthy. The low fill factor keeps each write on its page.';
COMMENT ON COLUMN vaultevents.health_probe.singleton IS 'Always true.';
COMMENT ON COLUMN vaultevents.health_probe.written_at IS 'The last write.';

CREATE TABLE vaultevents.idempotent_answers (
    account_id text NOT NULL,
    key text NOT NULL,
    fingerprint bytea NOT NULL,
    webhook_id text NOT NULL,
    key_id text NOT NULL,
    sealed bytea,
    created_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    CONSTRAINT idempotent_answers_fingerprint_check CHECK ((octet_length(fingerprint) = 32))
);
COMMENT ON TABLE vaultevents.idempotent_answers IS 'Answers to POST requests with an Idempotency-Key that created a webhook.';
COMMENT ON COLUMN vaultevents.idempotent_answers.account_id IS 'The account.';
COMMENT ON COLUMN vaultevents.idempotent_answers.key IS 'Idempotency-Key of the request.';
COMMENT ON COLUMN vaultevents.idempotent_answers.fingerprint IS 'SHA-256 of the JSON value of the request.';
COMMENT ON COLUMN vaultevents.idempotent_answers.webhook_id IS 'The webhook that was created.';
COMMENT ON COLUMN vaultevents.idempotent_answers.key_id IS 'Id of the master key that seals the answer.';
COMMENT ON COLUMN vaultevents.idempotent_answers.sealed IS 'Body of the answer with its secretToken, AES-256-GCM. Associated data: ''answer '' || webhook id. Null: deleted.';
COMMENT ON COLUMN vaultevents.idempotent_answers.created_at IS 'When the request was answered.';

CREATE TABLE vaultevents.interrupted (
    event_seq bigint NOT NULL
);
COMMENT ON TABLE vaultevents.interrupted IS 'Events first seen near the head with an attempt that was started and never settled: the receiver may have them.';
COMMENT ON COLUMN vaultevents.interrupted.event_seq IS 'The event: events.seq.';

CREATE TABLE vaultevents.key_ring (
    singleton boolean DEFAULT true NOT NULL,
    version bigint DEFAULT 0 NOT NULL,
    CONSTRAINT key_ring_singleton_check CHECK (singleton)
);
COMMENT ON TABLE vaultevents.key_ring IS 'Version of api_keys and api_public_keys, for processes that cache them.';
COMMENT ON COLUMN vaultevents.key_ring.singleton IS 'Always true.';
COMMENT ON COLUMN vaultevents.key_ring.version IS 'Random for each change, as registry.version.';

CREATE TABLE vaultevents.leases (
    webhook_id text NOT NULL,
    token uuid NOT NULL,
    until timestamp with time zone NOT NULL,
    delivery_ids bigint[] NOT NULL,
    resend_ids bigint[] DEFAULT '{}'::bigint[] NOT NULL
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0.1', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0');
COMMENT ON TABLE vaultevents.leases IS 'Deliveries or requests of one webhook that one claim took and that are not settled. A row counts until it is deleted, also when its time is over: deleting it makes its deliveries due again. A delivery that is parked, cancelled or delivered while leased leaves the queue at once; the lease stays until the attempt is settled, so that its result is kept.';
COMMENT ON COLUMN vaultevents.leases.webhook_id IS 'The webhook.';
COMMENT ON COLUMN vaultevents.leases.token IS 'Random for each claim. Every later write proves it.';
COMMENT ON COLUMN vaultevents.leases.until IS 'When the lease ends.';
COMMENT ON COLUMN vaultevents.leases.delivery_ids IS 'The deliveries: deliveries.id.';
COMMENT ON COLUMN vaultevents.leases.resend_ids IS 'The requests: resends.id. A lease has either of the two.';

CREATE TABLE vaultevents.mfa_factors (
    account_id text NOT NULL,
    key_id text NOT NULL,
    sealed bytea NOT NULL,
    enrolled_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    last_step bigint DEFAULT 0 NOT NULL,
    failures integer DEFAULT 0 NOT NULL,
    locked_until timestamp with time zone
);
COMMENT ON TABLE vaultevents.mfa_factors IS 'Step-up authentication: one TOTP factor an account.';
COMMENT ON COLUMN vaultevents.mfa_factors.account_id IS 'The account.';
COMMENT ON COLUMN vaultevents.mfa_factors.key_id IS 'Id of the master key that seals the seed.';
COMMENT ON COLUMN vaultevents.mfa_factors.sealed IS 'The TOTP seed, AES-256-GCM. Associated data: ''mfa '' || account id.';
COMMENT ON COLUMN vaultevents.mfa_factors.enrolled_at IS 'When it was enrolled.';
COMMENT ON COLUMN vaultevents.mfa_factors.last_step IS 'Newest TOTP time step that was accepted. It and earlier ones are refused.';
COMMENT ON COLUMN vaultevents.mfa_factors.failures IS 'Wrong codes since the last correct one.';
COMMENT ON COLUMN vaultevents.mfa_factors.locked_until IS 'Until when no code is accepted. Null: never locked since the last correct code.';

CREATE TABLE vaultevents.migrations (
    number integer NOT NULL,
    name text NOT NULL,
    sha256 bytea NOT NULL,
    applied_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);
COMMENT ON TABLE vaultevents.migrations IS 'Migrations that were applied to this schema. Append-only.';
COMMENT ON COLUMN vaultevents.migrations.number IS 'Number of the file, from 1 without a gap.';
COMMENT ON COLUMN vaultevents.migrations.name IS 'Name of the file.';
COMMENT ON COLUMN vaultevents.migrations.sha256 IS 'SHA-256 of the file as it was applied.';
COMMENT ON COLUMN vaultevents.migrations.applied_at IS 'When it was applied.';

CREATE TABLE vaultevents.near_blocks (
    stream text NOT NULL,
    number bigint NOT NULL,
    hash bytea NOT NULL,
    CONSTRAINT near_blocks_hash_check CHECK ((octet_length(hash) = 32)),
    CONSTRAINT near_blocks_number_check CHECK ((number >= 0))
);
COMMENT ON TABLE vaultevents.near_blocks IS 'Blocks that the live cursor of a stream has read above the finalized block, and the highest one at or below it. They show where a reorg began.';
COMMENT ON COLUMN vaultevents.near_blocks.stream IS 'Name of the stream.';
COMMENT ON COLUMN vaultevents.near_blocks.number IS 'Number of the execution block.';
COMMENT ON COLUMN vaultevents.near_blocks.hash IS 'Its hash as it was read.';

CREATE TABLE vaultevents.network (
    singleton boolean DEFAULT true NOT NULL,
    chain_id numeric(78,0) NOT NULL,
    genesis_hash bytea NOT NULL,
    pinned_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    genesis_validators_root bytea,
    genesis_s bigint,
    slot_ms integer,
    slots_per_epoch integer,
    CONSTRAINT network_genesis_hash_check CHECK ((octet_length(genesis_hash) = 32)),
    CONSTRAINT network_genesis_validators_root_check CHECK ((octet_length(genesis_validators_root) = 32)),
    CONSTRAINT network_singleton_check CHECK (singleton)
);
COMMENT ON TABLE vaultevents.network IS 'The network to which this database belongs, written at the first contact with an upstream. No row before that.';
COMMENT ON COLUMN vaultevents.network.singleton IS 'Always true.';
COMMENT ON COLUMN vaultevents.network.chain_id IS 'Result of eth_chainId.';
COMMENT ON COLUMN vaultevents.network.genesis_hash IS 'Hash of execution block 0.';
COMMENT ON COLUMN vaultevents.network.pinned_at IS 'When the network was recorded.';
COMMENT ON COLUMN vaultevents.network.genesis_validators_root IS 'From the Beacon API, as the columns after it. Null before the first contact with a beacon node.';
COMMENT ON COLUMN vaultevents.network.genesis_s IS 'Unix time of slot 0, in seconds.';
COMMENT ON COLUMN vaultevents.network.slot_ms IS 'Duration of a slot, in milliseconds.';
COMMENT ON COLUMN vaultevents.network.slots_per_epoch IS 'Slots in an epoch.';

CREATE TABLE vaultevents.nodes (
    upstream text NOT NULL,
    name text NOT NULL,
    state text NOT NULL,
    problem text,
    since timestamp with time zone NOT NULL,
    log_range integer,
    log_range_refused integer,
    requests_per_s double precision,
    updated_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    behind bigint,
    behind_at timestamp with time zone,
    latency_p50_s double precision,
    latency_p95_s double precision,
    CONSTRAINT nodes_behind_check CHECK ((behind >= 0)),
    CONSTRAINT nodes_check CHECK (((problem IS NULL) = (state = 'closed'::text))),
    CONSTRAINT nodes_check1 CHECK (((behind IS NULL) = (behind_at IS NULL))),
    CONSTRAINT nodes_check2 CHECK (((latency_p50_s IS NULL) = (latency_p95_s IS NULL))),
    CONSTRAINT nodes_latency_p50_s_check CHECK ((latency_p50_s >= (0)::double precision)),
    CONSTRAINT nodes_latency_p95_s_check CHECK ((latency_p95_s >= (0)::double precision)),
    CONSTRAINT nodes_log_range_check CHECK ((log_range > 0)),
    CONSTRAINT nodes_log_range_refused_check CHECK ((log_range_refused > 0)),
    CONSTRAINT nodes_requests_per_s_check CHECK ((requests_per_s > (0)::double precision)),
    CONSTRAINT nodes_state_check CHECK ((state = ANY (ARRAY['closed'::text, 'open'::text, 'trial'::text]))),
    CONSTRAINT nodes_upstream_check CHECK ((upstream = ANY (ARRAY['execution'::text, 'beacon'::text, 'ipfs'::text])))
);
COMMENT ON TABLE vaultevents.nodes IS 'State and learned limits of each configured node: for `status`, the metrics and the next start of the watcher.';
COMMENT ON COLUMN vaultevents.nodes.upstream IS 'Kind of node.';
COMMENT ON COLUMN vaultevents.nodes.name IS 'Redacted URL: scheme://host#hash.';
COMMENT ON COLUMN vaultevents.nodes.state IS 'State of the circuit breaker. `closed`: in use. `open`: not in use. `trial`: tried again.';
COMMENT ON COLUMN vaultevents.nodes.problem IS 'Why it is not closed.';
COMMENT ON COLUMN vaultevents.nodes.since IS 'Since when it has been in use, or not.';
COMMENT ON COLUMN vaultevents.nodes.log_range IS 'Blocks that one eth_getLogs may span, as learned. Null: not known.';
COMMENT ON COLUMN vaultevents.nodes.log_range_refused IS 'The fewest blocks that were refused for their number. Null: none was.';
COMMENT ON COLUMN vaultevents.nodes.requests_per_s IS 'Learned rate limit, in requests per second. Null: none.';
COMMENT ON COLUMN vaultevents.nodes.updated_at IS 'When the row was written.';
COMMENT ON COLUMN vaultevents.nodes.behind IS 'By how many blocks or slots its head was behind the newest head of a node of its kind. Null: not known.';
COMMENT ON COLUMN vaultevents.nodes.behind_at IS 'When it showed that head.';
COMMENT ON COLUMN vaultevents.nodes.latency_p50_s IS 'Median time from a request to its whole answer, in seconds, over its last answers. Null: none yet.';
COMMENT ON COLUMN vaultevents.nodes.latency_p95_s IS '95th percentile of the same times.';

CREATE TABLE vaultevents.notices (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    kind text NOT NULL,
    webhook_id text,
    reason text,
    count integer DEFAULT 1 NOT NULL,
    failures integer NOT NULL,
    failing_since timestamp with time zone,
    created_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    due_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    lease uuid,
    finished_at timestamp with time zone,
    sent boolean DEFAULT false NOT NULL,
    address bytea,
    block_number bigint,
    CONSTRAINT notices_about_check CHECK ((((webhook_id IS NULL) = (kind = 'logs_quarantined'::text)) AND ((address IS NOT NULL) = (kind = 'logs_quarantined'::text)) AND ((block_number IS NOT NULL) = (kind = 'logs_quarantined'::text)))),
    CONSTRAINT notices_address_check CHECK ((octet_length(address) = 20)),
    CONSTRAINT notices_check CHECK (((reason IS NOT NULL) = (kind = 'webhook_disabled'::text))),
    CONSTRAINT notices_count_check CHECK ((count > 0)),
    CONSTRAINT notices_kind_check CHECK ((kind = ANY (ARRAY['webhook_failing'::text, 'webhook_disabled'::text, 'delivery_exhausted'::text, 'webhook_enabled'::text, 'logs_quarantined'::text]))),
    CONSTRAINT notices_reason_check CHECK ((reason = ANY (ARRAY['failing'::text, 'gone'::text])))
);
COMMENT ON TABLE vaultevents.notices IS 'Notices to the operator, written in the transaction of the change that they report. Claimed under a lease, as deliveries are.';
COMMENT ON COLUMN vaultevents.notices.id IS 'Sent as `webhook-id`, the same at every attempt.';
COMMENT ON COLUMN vaultevents.notices.kind IS 'What happened.';
COMMENT ON COLUMN vaultevents.notices.webhook_id IS 'The webhook concerned. Null: quarantined logs.';
COMMENT ON COLUMN vaultevents.notices.reason IS 'Why a webhook was disabled: `failing`, or `gone` (it answered 410).';
COMMENT ON COLUMN vaultevents.notices.count IS 'Exhausted deliveries, or quarantined logs, that this notice reports together.';
COMMENT ON COLUMN vaultevents.notices.failures IS 'Value of webhooks.failures at that time.';
COMMENT ON COLUMN vaultevents.notices.failing_since IS 'Value of webhooks.first_failure_at at that time.';
COMMENT ON COLUMN vaultevents.notices.created_at IS 'When it happened.';
COMMENT ON COLUMN vaultevents.notices.attempts IS 'Claims so far.';
COMMENT ON COLUMN vaultevents.notices.due_at IS 'When the next attempt is due. While leased: when the lease ends.';
COMMENT ON COLUMN vaultevents.notices.lease IS 'Random for each claim. Null: not claimed.';
COMMENT ON COLUMN vaultevents.notices.finished_at IS 'When it was accepted, or cancelled. Null: waiting or leased.';
COMMENT ON COLUMN vaultevents.notices.sent IS 'True: accepted by the operator''s webhook.';
COMMENT ON COLUMN vaultevents.notices.address IS 'Contract whose logs were quarantined, 20 bytes. Null: about a webhook.';
COMMENT ON COLUMN vaultevents.notices.block_number IS 'Execution block of the first of these logs. Null: about a webhook.';

CREATE TABLE vaultevents.pruned (
    webhook_id text NOT NULL,
    chunk bigint NOT NULL,
    state text NOT NULL,
    recovered boolean NOT NULL,
    events int8multirange NOT NULL,
    CONSTRAINT pruned_state_check CHECK ((state = ANY (ARRAY['delivered'::text, 'cancelled'::text])))
);
COMMENT ON TABLE vaultevents.pruned IS 'The exact set of deliveries whose rows were pruned: the audit still proves each of them and `recover` resends none.';
COMMENT ON COLUMN vaultevents.pruned.webhook_id IS 'The webhook.';
COMMENT ON COLUMN vaultevents.pruned.chunk IS 'events.seq >> 10, so that a pruning batch rewrites small rows.';
COMMENT ON COLUMN vaultevents.pruned.state IS 'Their state.';
COMMENT ON COLUMN vaultevents.pruned.recovered IS 'As deliveries.recovered.';
COMMENT ON COLUMN vaultevents.pruned.events IS 'Ranges of events.seq.';

CREATE TABLE vaultevents.quarantined_addresses (
    address bytea NOT NULL,
    unnoticed bigint DEFAULT 0 NOT NULL,
    noticed_at timestamp with time zone,
    CONSTRAINT quarantined_addresses_address_check CHECK ((octet_length(address) = 20))
);
COMMENT ON TABLE vaultevents.quarantined_addresses IS 'When the operator was last notified of quarantined logs of an address.';
COMMENT ON COLUMN vaultevents.quarantined_addresses.address IS 'The contract, 20 bytes.';
COMMENT ON COLUMN vaultevents.quarantined_addresses.unnoticed IS 'Logs since the last notice.';
COMMENT ON COLUMN vaultevents.quarantined_addresses.noticed_at IS 'When the last notice was written. Null: never.';

CREATE TABLE vaultevents.quarantined_logs (
    id bigint NOT NULL,
    stream text NOT NULL,
    block_number bigint NOT NULL,
    block_hash bytea NOT NULL,
    log_index integer NOT NULL,
    tx_hash bytea NOT NULL,
    address bytea NOT NULL,
    topics bytea NOT NULL,
    data bytea NOT NULL,
    data_bytes integer NOT NULL,
    reason text NOT NULL,
    more integer DEFAULT 0 NOT NULL,
    state text DEFAULT 'open'::text NOT NULL,
    dismissed_because text,
    first_seen_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    changed_at timestamp with time zone,
    CONSTRAINT quarantined_logs_address_check CHECK ((octet_length(address) = 20)),
    CONSTRAINT quarantined_logs_block_hash_check CHECK ((octet_length(block_hash) = 32)),
    CONSTRAINT quarantined_logs_block_number_check CHECK ((block_number >= 0)),
    CONSTRAINT quarantined_logs_check CHECK (((state <> 'dismissed'::text) OR (dismissed_because IS NOT NULL))),
    CONSTRAINT quarantined_logs_data_check CHECK ((octet_length(data) <= 4096)),
    CONSTRAINT quarantined_logs_state_check CHECK ((state = ANY (ARRAY['open'::text, 'resolved'::text, 'dismissed'::text]))),
    CONSTRAINT quarantined_logs_topics_check CHECK (((octet_length(topics) % 32) = 0)),
    CONSTRAINT quarantined_logs_tx_hash_check CHECK ((octet_length(tx_hash) = 32))
);
COMMENT ON TABLE vaultevents.quarantined_logs IS 'Logs of watched addresses that cannot be decoded, stored in the transaction that moves the cursor of their stream past them. At most 100 for each address in a block. A reorg removes those of orphaned blocks. The registry says which accounts a log concerns.';
COMMENT ON COLUMN vaultevents.quarantined_logs.id IS 'Internal number.';
COMMENT ON COLUMN vaultevents.quarantined_logs.stream IS 'Stream that read it.';
COMMENT ON COLUMN vaultevents.quarantined_logs.block_number IS 'Execution block.';
COMMENT ON COLUMN vaultevents.quarantined_logs.block_hash IS 'Hash of the block.';
COMMENT ON COLUMN vaultevents.quarantined_logs.log_index IS 'Index of the log in its block.';
COMMENT ON COLUMN vaultevents.quarantined_logs.tx_hash IS 'Transaction of the log.';
COMMENT ON COLUMN vaultevents.quarantined_logs.address IS 'Contract that emitted it.';
COMMENT ON COLUMN vaultevents.quarantined_logs.topics IS 'Topics, 32 bytes each, one after the other.';
COMMENT ON COLUMN vaultevents.quarantined_logs.data IS 'The first 4096 bytes of its data.';
COMMENT ON COLUMN vaultevents.quarantined_logs.data_bytes IS 'Length of its data, in bytes.';
COMMENT ON COLUMN vaultevents.quarantined_logs.reason IS 'Why it cannot be decoded.';
COMMENT ON COLUMN vaultevents.quarantined_logs.more IS 'Further logs of the address in the block that have no row; in the last row only.';
COMMENT ON COLUMN vaultevents.quarantined_logs.state IS '`open`: no event was made of it. `resolved`: it was read again and decoded. `dismissed`: an operator dismissed it.';
COMMENT ON COLUMN vaultevents.quarantined_logs.dismissed_because IS 'Reason that the operator gave.';
COMMENT ON COLUMN vaultevents.quarantined_logs.first_seen_at IS 'When it was first read.';
COMMENT ON COLUMN vaultevents.quarantined_logs.changed_at IS 'When it was resolved or dismissed.';
ALTER TABLE vaultevents.quarantined_logs ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME vaultevents.quarantined_logs_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE vaultevents.queue (
    webhook_id text NOT NULL,
    delivery_id bigint,
    resend_id bigint,
    event_seq bigint,
    attempts integer DEFAULT 0 NOT NULL,
    due_at timestamp with time zone NOT NULL,
    turn smallint GENERATED ALWAYS AS (
CASE
    WHEN (resend_id IS NOT NULL) THEN 2
    ELSE LEAST(attempts, 1)
END) STORED NOT NULL,
    CONSTRAINT queue_check CHECK ((num_nonnulls(delivery_id, resend_id) = 1)),
    CONSTRAINT queue_check1 CHECK (((event_seq IS NOT NULL) OR (resend_id IS NOT NULL)))
)
WITH (autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0', fillfactor='90');
COMMENT ON TABLE vaultevents.queue IS 'One row for each delivery in state `scheduled` and each request for one more attempt, leased or not. No foreign keys: one statement writes it with its delivery or request, and the audit compares queue and deliveries.';
COMMENT ON COLUMN vaultevents.queue.webhook_id IS 'The webhook.';
COMMENT ON COLUMN vaultevents.queue.delivery_id IS 'The delivery: deliveries.id. Null: a request.';
COMMENT ON COLUMN vaultevents.queue.resend_id IS 'The request: resends.id. Null: a delivery.';
COMMENT ON COLUMN vaultevents.queue.event_seq IS 'The event: events.seq. Null: a test, which is no event.';
COMMENT ON COLUMN vaultevents.queue.attempts IS 'Attempts that are over.';
COMMENT ON COLUMN vaultevents.queue.due_at IS 'When the next attempt is due.';
COMMENT ON COLUMN vaultevents.queue.turn IS '0: first attempt. 1: retry. 2: request.';

CREATE TABLE vaultevents.registry (
    singleton boolean DEFAULT true NOT NULL,
    version bigint DEFAULT 0 NOT NULL,
    filter_revision bigint DEFAULT 0 NOT NULL,
    CONSTRAINT registry_singleton_check CHECK (singleton)
);
COMMENT ON TABLE vaultevents.registry IS 'The lock of everything that is registered. A transaction that commits events locks the row `for share`. A transaction that changes accounts, vaults or webhooks locks it `for update`.';
COMMENT ON COLUMN vaultevents.registry.singleton IS 'Always true.';
COMMENT ON COLUMN vaultevents.registry.version IS 'Random for each change of vaults, spans or validators, so that two copies of a database never share the version of different contents.';
COMMENT ON COLUMN vaultevents.registry.filter_revision IS 'Number of the last row of webhook_revisions.';

CREATE TABLE vaultevents.reports (
    id bigint NOT NULL,
    block_number bigint NOT NULL,
    block_time_s bigint NOT NULL,
    tx_hash bytea NOT NULL,
    log_index integer NOT NULL,
    oracle bytea NOT NULL,
    report_timestamp numeric(78,0) NOT NULL,
    ref_slot numeric(78,0) NOT NULL,
    root bytea NOT NULL,
    cid text NOT NULL,
    state text NOT NULL,
    vaults integer,
    attempts integer DEFAULT 0 NOT NULL,
    next_attempt_at timestamp with time zone,
    problem text,
    seen_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    resolved_at timestamp with time zone,
    failure text,
    CONSTRAINT reports_check CHECK (((state = 'pending'::text) = (next_attempt_at IS NOT NULL))),
    CONSTRAINT reports_failure_check CHECK ((failure = ANY (ARRAY['unavailable'::text, 'mismatch'::text, 'undecodable'::text]))),
    CONSTRAINT reports_oracle_check CHECK ((octet_length(oracle) = 20)),
    CONSTRAINT reports_root_check CHECK ((octet_length(root) = 32)),
    CONSTRAINT reports_state_check CHECK ((state = ANY (ARRAY['pending'::text, 'resolved'::text, 'empty'::text, 'given_up'::text]))),
    CONSTRAINT reports_tx_hash_check CHECK ((octet_length(tx_hash) = 32))
);
COMMENT ON TABLE vaultevents.reports IS 'Published oracle reports. The log is committed with the cursor of the stream `reports`; its file is fetched from IPFS, verified and turned into events afterwards.';
COMMENT ON COLUMN vaultevents.reports.id IS 'Internal number.';
COMMENT ON COLUMN vaultevents.reports.block_number IS 'Execution block of the log.';
COMMENT ON COLUMN vaultevents.reports.block_time_s IS 'Unix time of that block, in seconds.';
COMMENT ON COLUMN vaultevents.reports.tx_hash IS 'Transaction of the log.';
COMMENT ON COLUMN vaultevents.reports.log_index IS 'Index of the log in its block.';
COMMENT ON COLUMN vaultevents.reports.oracle IS 'Contract that emitted it, 20 bytes.';
COMMENT ON COLUMN vaultevents.reports.report_timestamp IS 'Timestamp in the log: Unix time, in seconds.';
COMMENT ON COLUMN vaultevents.reports.ref_slot IS 'Reference slot in the log.';
COMMENT ON COLUMN vaultevents.reports.root IS 'Merkle root in the log.';
COMMENT ON COLUMN vaultevents.reports.cid IS 'CID of the file in the log.';
COMMENT ON COLUMN vaultevents.reports.state IS '`pending`: the file is not verified yet. `resolved`: its events are stored. `empty`: no vault was connected, so there is no file. `given_up`: an operator cancelled it.';
COMMENT ON COLUMN vaultevents.reports.vaults IS 'Leaves of the Merkle tree. Null until it is verified.';
COMMENT ON COLUMN vaultevents.reports.attempts IS 'Attempts to fetch the file since it is pending.';
COMMENT ON COLUMN vaultevents.reports.next_attempt_at IS 'When the next attempt is due. Null: not pending.';
COMMENT ON COLUMN vaultevents.reports.problem IS 'Why the last attempt failed.';
COMMENT ON COLUMN vaultevents.reports.seen_at IS 'When the log was committed.';
COMMENT ON COLUMN vaultevents.reports.resolved_at IS 'When its events were stored. Null: not resolved.';
COMMENT ON COLUMN vaultevents.reports.failure IS 'Why there are no events yet. `unavailable`: no gateway has the file. `mismatch`: gateways returned other bytes. `undecodable`: the published file cannot be read. Null: no attempt has failed.';
ALTER TABLE vaultevents.reports ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME vaultevents.reports_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE vaultevents.resends (
    id bigint NOT NULL,
    webhook_id text NOT NULL,
    event_seq bigint,
    event_id text NOT NULL,
    body bytea,
    requested_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    lease uuid,
    started_at timestamp with time zone,
    duration_ms integer,
    status smallint,
    error text,
    excerpt text,
    address text,
    dns_ms integer,
    connect_ms integer,
    tls_ms integer,
    first_byte_ms integer,
    finished_at timestamp with time zone,
    CONSTRAINT resends_check CHECK (((event_seq IS NULL) = (body IS NOT NULL))),
    CONSTRAINT resends_check1 CHECK (((finished_at IS NULL) = (started_at IS NULL)))
);
COMMENT ON TABLE vaultevents.resends IS 'Requests of accounts: resends, recoveries and tests. A row is one request for one attempt, and afterwards its result. It is never retried and does not count towards the health of the webhook. No foreign keys: one statement writes it from the webhook and the event.';
COMMENT ON COLUMN vaultevents.resends.id IS 'Internal number.';
COMMENT ON COLUMN vaultevents.resends.webhook_id IS 'The webhook.';
COMMENT ON COLUMN vaultevents.resends.event_seq IS 'The event: events.seq. Null: a test, which is no event.';
COMMENT ON COLUMN vaultevents.resends.event_id IS 'Sent as `webhook-id`.';
COMMENT ON COLUMN vaultevents.resends.body IS 'Body of a test. Null: an event has its own.';
COMMENT ON COLUMN vaultevents.resends.requested_at IS 'When it was requested.';
COMMENT ON COLUMN vaultevents.resends.lease IS 'Token of the lease while the attempt is under way. Null: not claimed.';
COMMENT ON COLUMN vaultevents.resends.started_at IS 'As attempts.started_at. Null until the attempt is over, as the columns after it.';
COMMENT ON COLUMN vaultevents.resends.duration_ms IS 'As attempts.duration_ms, in milliseconds.';
COMMENT ON COLUMN vaultevents.resends.status IS 'As attempts.status.';
COMMENT ON COLUMN vaultevents.resends.error IS 'As attempts.error.';
COMMENT ON COLUMN vaultevents.resends.excerpt IS 'As attempts.excerpt.';
COMMENT ON COLUMN vaultevents.resends.address IS 'As attempts.address.';
COMMENT ON COLUMN vaultevents.resends.dns_ms IS 'As attempts.dns_ms, in milliseconds.';
COMMENT ON COLUMN vaultevents.resends.connect_ms IS 'As attempts.connect_ms, in milliseconds.';
COMMENT ON COLUMN vaultevents.resends.tls_ms IS 'As attempts.tls_ms, in milliseconds.';
COMMENT ON COLUMN vaultevents.resends.first_byte_ms IS 'As attempts.first_byte_ms, in milliseconds.';
COMMENT ON COLUMN vaultevents.resends.finished_at IS 'When the result was written. Null: waiting or leased.';
ALTER TABLE vaultevents.resends ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME vaultevents.resends_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE vaultevents.row_totals (
    id bigint NOT NULL,
    counted text NOT NULL,
    difference bigint NOT NULL,
    CONSTRAINT row_totals_counted_check CHECK ((counted = ANY (ARRAY['events'::text, 'deliveries'::text])))
);
COMMENT ON TABLE vaultevents.row_totals IS 'How many events and deliveries there are, without counting them. Each statement that adds or removes rows adds a row with the difference, so the sum is exact in every snapshot and no writer waits for another. Updates cost nothing.';
COMMENT ON COLUMN vaultevents.row_totals.id IS 'Every 64th entry replaces unlocked rows by their sum.';
COMMENT ON COLUMN vaultevents.row_totals.counted IS 'Name of the table.';
COMMENT ON COLUMN vaultevents.row_totals.difference IS 'Rows added, or removed if negative.';
ALTER TABLE vaultevents.row_totals ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME vaultevents.row_totals_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE vaultevents.used_tokens (
    digest bytea NOT NULL,
    account_id text NOT NULL,
    used_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    CONSTRAINT used_tokens_digest_check CHECK ((octet_length(digest) = 32))
);
COMMENT ON TABLE vaultevents.used_tokens IS 'JWTs that authorized a change: each is accepted once. Logged, so that it survives a crash.';
COMMENT ON COLUMN vaultevents.used_tokens.digest IS 'SHA-256 of the API key''s id and the signing input of the token.';
COMMENT ON COLUMN vaultevents.used_tokens.account_id IS 'Account of the token.';
COMMENT ON COLUMN vaultevents.used_tokens.used_at IS 'When it was used.';

CREATE TABLE vaultevents.validators (
    index bigint NOT NULL,
    pubkey bytea NOT NULL,
    credentials bytea NOT NULL,
    activation_epoch bigint,
    exit_epoch bigint,
    found_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    CONSTRAINT validators_credentials_check CHECK ((octet_length(credentials) = 32)),
    CONSTRAINT validators_pubkey_check CHECK ((octet_length(pubkey) = 48))
);
COMMENT ON TABLE vaultevents.validators IS 'Validators whose withdrawal credentials name a registered vault. From the Beacon API.';
COMMENT ON COLUMN vaultevents.validators.index IS 'Validator index.';
COMMENT ON COLUMN vaultevents.validators.pubkey IS 'BLS public key, 48 bytes.';
COMMENT ON COLUMN vaultevents.validators.credentials IS 'Withdrawal credentials, 32 bytes.';
COMMENT ON COLUMN vaultevents.validators.activation_epoch IS 'Null: not assigned yet. Written once.';
COMMENT ON COLUMN vaultevents.validators.exit_epoch IS 'Null: not assigned yet. Written once.';
COMMENT ON COLUMN vaultevents.validators.found_at IS 'When it was found.';

CREATE TABLE vaultevents.vault_spans (
    account_id text NOT NULL,
    vault_id text NOT NULL,
    ordinal integer NOT NULL,
    first_block bigint NOT NULL,
    last_block bigint,
    deliver_from bigint DEFAULT 0 NOT NULL,
    first_time_s bigint,
    last_time_s bigint,
    quiet_time_s bigint,
    CONSTRAINT vault_spans_check CHECK ((last_block >= (first_block - 1))),
    CONSTRAINT vault_spans_first_block_check CHECK ((first_block >= 0))
);
COMMENT ON TABLE vaultevents.vault_spans IS 'Ranges of blocks for which a vault is registered. At most one range of a vault is open.';
COMMENT ON COLUMN vaultevents.vault_spans.account_id IS 'Account of the vault.';
COMMENT ON COLUMN vaultevents.vault_spans.vault_id IS 'The vault.';
COMMENT ON COLUMN vaultevents.vault_spans.ordinal IS 'Number of the span of this vault, in order of registration.';
COMMENT ON COLUMN vaultevents.vault_spans.first_block IS 'First execution block of the span.';
COMMENT ON COLUMN vaultevents.vault_spans.last_block IS 'Last execution block of the span. Null: the vault is registered now.';
COMMENT ON COLUMN vaultevents.vault_spans.deliver_from IS 'Execution block. Events of earlier blocks are stored and delivered to no webhook.';
COMMENT ON COLUMN vaultevents.vault_spans.first_time_s IS 'Unix time of `first_block`, in seconds. Null until that block is final. Places events that have a time and no block.';
COMMENT ON COLUMN vaultevents.vault_spans.last_time_s IS 'Unix time of `last_block`, in seconds. Null until that block is final.';
COMMENT ON COLUMN vaultevents.vault_spans.quiet_time_s IS 'Unix time of block `deliver_from` - 1, in seconds. Null until that block is final.';

CREATE TABLE vaultevents.vaults (
    account_id text NOT NULL,
    id text NOT NULL,
    address bytea NOT NULL,
    queue bytea,
    created_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    CONSTRAINT vaults_address_check CHECK ((octet_length(address) = 20)),
    CONSTRAINT vaults_id_check CHECK ((id ~ '^[A-Za-z0-9-]{1,64}$'::text)),
    CONSTRAINT vaults_queue_check CHECK ((octet_length(queue) = 20))
);
COMMENT ON TABLE vaultevents.vaults IS 'Staking vaults that an account registered. Several accounts may register the same address.';
COMMENT ON COLUMN vaultevents.vaults.account_id IS 'Account that registered the vault.';
COMMENT ON COLUMN vaultevents.vaults.id IS 'Chosen by the operator; unique in the account.';
COMMENT ON COLUMN vaultevents.vaults.address IS 'Address of the vault contract, 20 bytes.';
COMMENT ON COLUMN vaultevents.vaults.queue IS 'Address of the withdrawal queue contract, 20 bytes. Null: none is watched.';
COMMENT ON COLUMN vaultevents.vaults.created_at IS 'When the vault was first registered.';

CREATE TABLE vaultevents.webhook_revisions (
    revision bigint NOT NULL,
    webhook_id text NOT NULL,
    account_id text NOT NULL,
    event_types text[],
    vault_ids text[],
    active boolean NOT NULL,
    changed_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL
);
COMMENT ON TABLE vaultevents.webhook_revisions IS 'Every filter that a webhook has had. With events.filter_revision it proves which deliveries there must be.';
COMMENT ON COLUMN vaultevents.webhook_revisions.revision IS 'From registry.filter_revision; rises with each change of any webhook.';
COMMENT ON COLUMN vaultevents.webhook_revisions.webhook_id IS 'The webhook.';
COMMENT ON COLUMN vaultevents.webhook_revisions.account_id IS 'Its account.';
COMMENT ON COLUMN vaultevents.webhook_revisions.event_types IS 'As webhooks.event_types from this revision on.';
COMMENT ON COLUMN vaultevents.webhook_revisions.vault_ids IS 'As webhooks.vault_ids from this revision on.';
COMMENT ON COLUMN vaultevents.webhook_revisions.active IS 'As webhooks.active from this revision on; also false once deleted.';
COMMENT ON COLUMN vaultevents.webhook_revisions.changed_at IS 'When the change was made.';

CREATE TABLE vaultevents.webhook_secrets (
    webhook_id text NOT NULL,
    created_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    key_id text NOT NULL,
    sealed bytea NOT NULL,
    valid_until timestamp with time zone
);
COMMENT ON TABLE vaultevents.webhook_secrets IS 'Secrets that sign the POSTs of a webhook: the newest, and the former one for an overlap.';
COMMENT ON COLUMN vaultevents.webhook_secrets.webhook_id IS 'The webhook.';
COMMENT ON COLUMN vaultevents.webhook_secrets.created_at IS 'When the secret was created. The newest signs first.';
COMMENT ON COLUMN vaultevents.webhook_secrets.key_id IS 'Id of the master key that seals the secret.';
COMMENT ON COLUMN vaultevents.webhook_secrets.sealed IS 'The secret, AES-256-GCM. Associated data: the webhook id.';
COMMENT ON COLUMN vaultevents.webhook_secrets.valid_until IS 'Until when a replaced secret signs beside the newest. Null: the newest.';

CREATE TABLE vaultevents.webhooks (
    id text NOT NULL,
    account_id text NOT NULL,
    url text NOT NULL,
    event_types text[],
    vault_ids text[],
    active boolean NOT NULL,
    disabled_reason text,
    paused_until timestamp with time zone,
    created_at timestamp with time zone DEFAULT vaultevents.db_now() NOT NULL,
    deleted_at timestamp with time zone,
    failures integer DEFAULT 0 NOT NULL,
    first_failure_at timestamp with time zone,
    last_failure_at timestamp with time zone,
    parks integer DEFAULT 0 NOT NULL,
    parked_until timestamp with time zone,
    warned_at timestamp with time zone,
    CONSTRAINT webhooks_event_types_check CHECK ((cardinality(event_types) > 0)),
    CONSTRAINT webhooks_vault_ids_check CHECK ((cardinality(vault_ids) > 0))
);
COMMENT ON TABLE vaultevents.webhooks IS 'HTTPS endpoints of accounts, their filters and the state of their health.';
COMMENT ON COLUMN vaultevents.webhooks.id IS 'Random; stable for the life of the webhook.';
COMMENT ON COLUMN vaultevents.webhooks.account_id IS 'Account that owns the webhook.';
COMMENT ON COLUMN vaultevents.webhooks.url IS 'HTTPS URL to which events are POSTed.';
COMMENT ON COLUMN vaultevents.webhooks.event_types IS 'Event types to deliver. Null: all.';
COMMENT ON COLUMN vaultevents.webhooks.vault_ids IS 'Ids of the vaults whose events are delivered. Null: all.';
COMMENT ON COLUMN vaultevents.webhooks.active IS 'False: switched off; nothing is delivered.';
COMMENT ON COLUMN vaultevents.webhooks.disabled_reason IS 'Why the service switched the webhook off. Null: its account did, or it is on.';
COMMENT ON COLUMN vaultevents.webhooks.paused_until IS 'Until when the receiver asked for a pause with `Retry-After`.';
COMMENT ON COLUMN vaultevents.webhooks.created_at IS 'When the webhook was created.';
COMMENT ON COLUMN vaultevents.webhooks.deleted_at IS 'When the webhook was deleted. The row remains for the history.';
COMMENT ON COLUMN vaultevents.webhooks.failures IS 'Failed attempts since the last success, creation or re-enabling.';
COMMENT ON COLUMN vaultevents.webhooks.first_failure_at IS 'The first of these failures.';
COMMENT ON COLUMN vaultevents.webhooks.last_failure_at IS 'The last of these failures.';
COMMENT ON COLUMN vaultevents.webhooks.parks IS 'How often these failures parked the webhook.';
COMMENT ON COLUMN vaultevents.webhooks.parked_until IS 'Until when failures park the webhook.';
COMMENT ON COLUMN vaultevents.webhooks.warned_at IS 'When the operator was notified that these failures may switch the webhook off.';
ALTER TABLE ONLY vaultevents.accounts
    ADD CONSTRAINT accounts_pkey PRIMARY KEY (id);
ALTER TABLE ONLY vaultevents.api_key_uses
    ADD CONSTRAINT api_key_uses_pkey PRIMARY KEY (api_key_id);
ALTER TABLE ONLY vaultevents.api_keys
    ADD CONSTRAINT api_keys_hash_key UNIQUE (hash);
ALTER TABLE ONLY vaultevents.api_keys
    ADD CONSTRAINT api_keys_pkey PRIMARY KEY (id);
ALTER TABLE ONLY vaultevents.api_public_keys
    ADD CONSTRAINT api_public_keys_pkey PRIMARY KEY (api_key_id, fingerprint);
ALTER TABLE ONLY vaultevents.attempts
    ADD CONSTRAINT attempts_pkey PRIMARY KEY (delivery_id, number);
ALTER TABLE ONLY vaultevents.audit_log
    ADD CONSTRAINT audit_log_hash_key UNIQUE (hash);
ALTER TABLE ONLY vaultevents.audit_log
    ADD CONSTRAINT audit_log_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY vaultevents.audit_log
    ADD CONSTRAINT audit_log_previous_hash_key UNIQUE (previous_hash);
ALTER TABLE ONLY vaultevents.console_links
    ADD CONSTRAINT console_links_pkey PRIMARY KEY (digest);
ALTER TABLE ONLY vaultevents.console_sessions
    ADD CONSTRAINT console_sessions_digest_key UNIQUE (digest);
ALTER TABLE ONLY vaultevents.console_sessions
    ADD CONSTRAINT console_sessions_pkey PRIMARY KEY (id);
ALTER TABLE ONLY vaultevents.cursors
    ADD CONSTRAINT cursors_pkey PRIMARY KEY (id);
ALTER TABLE ONLY vaultevents.deliveries
    ADD CONSTRAINT deliveries_event_seq_webhook_id_key UNIQUE (event_seq, webhook_id);
ALTER TABLE ONLY vaultevents.deliveries
    ADD CONSTRAINT deliveries_pkey PRIMARY KEY (id);
ALTER TABLE ONLY vaultevents.deposit_searches
    ADD CONSTRAINT deposit_searches_pkey PRIMARY KEY (id);
ALTER TABLE ONLY vaultevents.deposits
    ADD CONSTRAINT deposits_pkey PRIMARY KEY (pubkey, vault);
ALTER TABLE ONLY vaultevents.discovery
    ADD CONSTRAINT discovery_pkey PRIMARY KEY (singleton);
ALTER TABLE ONLY vaultevents.events
    ADD CONSTRAINT events_account_id_id_key UNIQUE (account_id, id);
ALTER TABLE ONLY vaultevents.events
    ADD CONSTRAINT events_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY vaultevents.feed
    ADD CONSTRAINT feed_pkey PRIMARY KEY (singleton);
ALTER TABLE ONLY vaultevents.flag_changes
    ADD CONSTRAINT flag_changes_pkey PRIMARY KEY (id);
ALTER TABLE ONLY vaultevents.hash_key
    ADD CONSTRAINT hash_key_pkey PRIMARY KEY (singleton);
ALTER TABLE ONLY vaultevents.health_probe
    ADD CONSTRAINT health_probe_pkey PRIMARY KEY (singleton);
ALTER TABLE ONLY vaultevents.idempotent_answers
    ADD CONSTRAINT idempotent_answers_pkey PRIMARY KEY (account_id, key);
ALTER TABLE ONLY vaultevents.interrupted
    ADD CONSTRAINT interrupted_pkey PRIMARY KEY (event_seq);
ALTER TABLE ONLY vaultevents.key_ring
    ADD CONSTRAINT key_ring_pkey PRIMARY KEY (singleton);
ALTER TABLE ONLY vaultevents.leases
    ADD CONSTRAINT leases_pkey PRIMARY KEY (webhook_id, token);
ALTER TABLE ONLY vaultevents.mfa_factors
    ADD CONSTRAINT mfa_factors_pkey PRIMARY KEY (account_id);
ALTER TABLE ONLY vaultevents.migrations
    ADD CONSTRAINT migrations_pkey PRIMARY KEY (number);
ALTER TABLE ONLY vaultevents.near_blocks
    ADD CONSTRAINT near_blocks_pkey PRIMARY KEY (stream, number);
ALTER TABLE ONLY vaultevents.network
    ADD CONSTRAINT network_pkey PRIMARY KEY (singleton);
ALTER TABLE ONLY vaultevents.nodes
    ADD CONSTRAINT nodes_pkey PRIMARY KEY (upstream, name);
ALTER TABLE ONLY vaultevents.notices
    ADD CONSTRAINT notices_pkey PRIMARY KEY (id);
ALTER TABLE ONLY vaultevents.pruned
    ADD CONSTRAINT pruned_pkey PRIMARY KEY (webhook_id, chunk, state, recovered);
ALTER TABLE ONLY vaultevents.quarantined_addresses
    ADD CONSTRAINT quarantined_addresses_pkey PRIMARY KEY (address);
ALTER TABLE ONLY vaultevents.quarantined_logs
    ADD CONSTRAINT quarantined_logs_pkey PRIMARY KEY (id);
ALTER TABLE ONLY vaultevents.quarantined_logs
    ADD CONSTRAINT quarantined_logs_stream_block_number_log_index_key UNIQUE (stream, block_number, log_index);
ALTER TABLE ONLY vaultevents.registry
    ADD CONSTRAINT registry_pkey PRIMARY KEY (singleton);
ALTER TABLE ONLY vaultevents.reports
    ADD CONSTRAINT reports_block_number_log_index_key UNIQUE (block_number, log_index);
ALTER TABLE ONLY vaultevents.reports
    ADD CONSTRAINT reports_pkey PRIMARY KEY (id);
ALTER TABLE ONLY vaultevents.resends
    ADD CONSTRAINT resends_pkey PRIMARY KEY (id);
ALTER TABLE ONLY vaultevents.row_totals
    ADD CONSTRAINT row_totals_pkey PRIMARY KEY (id);
ALTER TABLE ONLY vaultevents.used_tokens
    ADD CONSTRAINT used_tokens_pkey PRIMARY KEY (digest);
ALTER TABLE ONLY vaultevents.validators
    ADD CONSTRAINT validators_pkey PRIMARY KEY (index);
ALTER TABLE ONLY vaultevents.vault_spans
    ADD CONSTRAINT vault_spans_pkey PRIMARY KEY (account_id, vault_id, ordinal);
ALTER TABLE ONLY vaultevents.vaults
    ADD CONSTRAINT vaults_account_id_address_key UNIQUE (account_id, address);
ALTER TABLE ONLY vaultevents.vaults
    ADD CONSTRAINT vaults_account_id_queue_key UNIQUE (account_id, queue);
ALTER TABLE ONLY vaultevents.vaults
    ADD CONSTRAINT vaults_pkey PRIMARY KEY (account_id, id);
ALTER TABLE ONLY vaultevents.webhook_revisions
    ADD CONSTRAINT webhook_revisions_pkey PRIMARY KEY (revision);
ALTER TABLE ONLY vaultevents.webhook_secrets
    ADD CONSTRAINT webhook_secrets_pkey PRIMARY KEY (webhook_id, created_at);
ALTER TABLE ONLY vaultevents.webhooks
    ADD CONSTRAINT webhooks_pkey PRIMARY KEY (id);

CREATE INDEX api_keys_of_account ON vaultevents.api_keys USING btree (account_id);

CREATE INDEX audit_log_by_account ON vaultevents.audit_log USING btree (account_id, seq);

CREATE UNIQUE INDEX cursors_audit ON vaultevents.cursors USING btree (stream, node) NULLS NOT DISTINCT WHERE (kind = 'audit'::text);

CREATE UNIQUE INDEX cursors_live ON vaultevents.cursors USING btree (stream) WHERE (kind = 'live'::text);

CREATE INDEX deliveries_apart ON vaultevents.deliveries USING btree (webhook_id, apart, id) WHERE (apart IS NOT NULL);

CREATE INDEX deliveries_of_webhook ON vaultevents.deliveries USING btree (webhook_id, id);

CREATE INDEX due_webhooks_later ON vaultevents.due_webhooks USING btree (due_at, webhook_id) WHERE (due_at IS NOT NULL);

CREATE INDEX due_webhooks_now ON vaultevents.due_webhooks USING btree (webhook_id) WHERE (due_at IS NULL);

CREATE INDEX events_by_time ON vaultevents.events USING btree (account_id, created_at_ms);

CREATE INDEX events_feed ON vaultevents.events USING btree (account_id, committed_xid, seq);

CREATE INDEX events_near_head ON vaultevents.events USING btree (block_number) WHERE near_head;

CREATE INDEX events_of_blocks ON vaultevents.events USING brin (block_number int8_minmax_multi_ops) WITH (pages_per_range='32', autosummarize='on');

CREATE INDEX events_orphaned ON vaultevents.events USING btree (orphaned_at) WHERE (orphaned_at IS NOT NULL);

CREATE INDEX flag_changes_of_webhook ON vaultevents.flag_changes USING btree (webhook_id, id);

CREATE INDEX idempotent_answers_by_age ON vaultevents.idempotent_answers USING btree (created_at);

CREATE INDEX notices_finished ON vaultevents.notices USING btree (finished_at) WHERE (finished_at IS NOT NULL);

CREATE INDEX notices_waiting ON vaultevents.notices USING btree (due_at) WHERE (finished_at IS NULL);

CREATE INDEX quarantined_by_address ON vaultevents.quarantined_logs USING btree (address, id);

CREATE INDEX quarantined_by_state ON vaultevents.quarantined_logs USING btree (state, id);

CREATE INDEX quarantined_open ON vaultevents.quarantined_logs USING btree (block_number, stream) INCLUDE (more) WHERE (state = 'open'::text);

CREATE UNIQUE INDEX queue_of_delivery ON vaultevents.queue USING btree (webhook_id, delivery_id);

CREATE UNIQUE INDEX queue_of_resend ON vaultevents.queue USING btree (webhook_id, resend_id) WHERE (resend_id IS NOT NULL);

CREATE INDEX queue_ready ON vaultevents.queue USING btree (webhook_id, turn, due_at);

CREATE INDEX reports_due ON vaultevents.reports USING btree (next_attempt_at) WHERE (state = 'pending'::text);

CREATE INDEX resends_of_event ON vaultevents.resends USING btree (webhook_id, event_seq);

CREATE INDEX used_tokens_by_age ON vaultevents.used_tokens USING btree (used_at);

CREATE UNIQUE INDEX vault_spans_open ON vaultevents.vault_spans USING btree (account_id, vault_id) WHERE (last_block IS NULL);

CREATE INDEX webhook_revisions_of_webhook ON vaultevents.webhook_revisions USING btree (webhook_id, revision);

CREATE INDEX webhooks_of_account ON vaultevents.webhooks USING btree (account_id) WHERE (deleted_at IS NULL);

CREATE TRIGGER count_deleted AFTER DELETE ON vaultevents.deliveries REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION vaultevents.count_rows();

CREATE TRIGGER count_deleted AFTER DELETE ON vaultevents.events REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION vaultevents.count_rows();

CREATE TRIGGER count_inserted AFTER INSERT ON vaultevents.deliveries REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION vaultevents.count_rows();

CREATE TRIGGER count_inserted AFTER INSERT ON vaultevents.events REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION vaultevents.count_rows();

CREATE TRIGGER count_truncated AFTER TRUNCATE ON vaultevents.deliveries FOR EACH STATEMENT EXECUTE FUNCTION vaultevents.count_rows();

CREATE TRIGGER count_truncated AFTER TRUNCATE ON vaultevents.events FOR EACH STATEMENT EXECUTE FUNCTION vaultevents.count_rows();

CREATE TRIGGER mark_claimable AFTER UPDATE ON vaultevents.webhooks FOR EACH ROW WHEN ((new.active AND (new.deleted_at IS NULL) AND ((((old.active IS DISTINCT FROM new.active) OR (old.paused_until IS DISTINCT FROM new.paused_until)) OR (old.parked_until IS DISTINCT FROM new.parked_until)) OR (old.parks IS DISTINCT FROM new.parks)))) EXECUTE FUNCTION vaultevents.mark_webhook();

CREATE TRIGGER mark_inserted AFTER INSERT ON vaultevents.queue REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION vaultevents.mark_queued();

CREATE TRIGGER mark_updated AFTER UPDATE ON vaultevents.queue REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION vaultevents.mark_queued();

CREATE TRIGGER refuse_change BEFORE DELETE OR UPDATE OR TRUNCATE ON vaultevents.audit_log FOR EACH STATEMENT EXECUTE FUNCTION vaultevents.refuse_audit_change();
ALTER TABLE vaultevents.audit_log ENABLE ALWAYS TRIGGER refuse_change;
ALTER TABLE ONLY vaultevents.api_key_uses
    ADD CONSTRAINT api_key_uses_api_key_id_fkey FOREIGN KEY (api_key_id) REFERENCES vaultevents.api_keys(id);
ALTER TABLE ONLY vaultevents.api_keys
    ADD CONSTRAINT api_keys_account_id_fkey FOREIGN KEY (account_id) REFERENCES vaultevents.accounts(id);
ALTER TABLE ONLY vaultevents.api_public_keys
    ADD CONSTRAINT api_public_keys_api_key_id_fkey FOREIGN KEY (api_key_id) REFERENCES vaultevents.api_keys(id);
ALTER TABLE ONLY vaultevents.deliveries
    ADD CONSTRAINT deliveries_event_seq_fkey FOREIGN KEY (event_seq) REFERENCES vaultevents.events(seq);
ALTER TABLE ONLY vaultevents.deliveries
    ADD CONSTRAINT deliveries_webhook_id_fkey FOREIGN KEY (webhook_id) REFERENCES vaultevents.webhooks(id);
ALTER TABLE ONLY vaultevents.events
    ADD CONSTRAINT events_account_id_fkey FOREIGN KEY (account_id) REFERENCES vaultevents.accounts(id);
ALTER TABLE ONLY vaultevents.idempotent_answers
    ADD CONSTRAINT idempotent_answers_account_id_fkey FOREIGN KEY (account_id) REFERENCES vaultevents.accounts(id);
ALTER TABLE ONLY vaultevents.idempotent_answers
    ADD CONSTRAINT idempotent_answers_webhook_id_fkey FOREIGN KEY (webhook_id) REFERENCES vaultevents.webhooks(id);
ALTER TABLE ONLY vaultevents.mfa_factors
    ADD CONSTRAINT mfa_factors_account_id_fkey FOREIGN KEY (account_id) REFERENCES vaultevents.accounts(id);
ALTER TABLE ONLY vaultevents.notices
    ADD CONSTRAINT notices_webhook_id_fkey FOREIGN KEY (webhook_id) REFERENCES vaultevents.webhooks(id) ON DELETE CASCADE;
ALTER TABLE ONLY vaultevents.vault_spans
    ADD CONSTRAINT vault_spans_account_id_vault_id_fkey FOREIGN KEY (account_id, vault_id) REFERENCES vaultevents.vaults(account_id, id);
ALTER TABLE ONLY vaultevents.vaults
    ADD CONSTRAINT vaults_account_id_fkey FOREIGN KEY (account_id) REFERENCES vaultevents.accounts(id);
ALTER TABLE ONLY vaultevents.webhook_revisions
    ADD CONSTRAINT webhook_revisions_webhook_id_fkey FOREIGN KEY (webhook_id) REFERENCES vaultevents.webhooks(id);
ALTER TABLE ONLY vaultevents.webhook_secrets
    ADD CONSTRAINT webhook_secrets_webhook_id_fkey FOREIGN KEY (webhook_id) REFERENCES vaultevents.webhooks(id);
ALTER TABLE ONLY vaultevents.webhooks
    ADD CONSTRAINT webhooks_account_id_fkey FOREIGN KEY (account_id) REFERENCES vaultevents.accounts(id);
ALTER TABLE vaultevents.accounts ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.attempts ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.audit_log ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.deliveries ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.due_webhooks ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.events ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.flag_changes ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.idempotent_answers ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.leases ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.mfa_factors ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.notices ENABLE ROW LEVEL SECURITY;

CREATE POLICY own_account ON vaultevents.accounts TO vaultevents_api USING ((id = current_setting('vaultevents.account'::text, true)));

CREATE POLICY own_account ON vaultevents.attempts TO vaultevents_api USING ((EXISTS ( SELECT
   FROM vaultevents.deliveries d
  WHERE (d.id = attempts.delivery_id))));

CREATE POLICY own_account ON vaultevents.deliveries TO vaultevents_api USING ((EXISTS ( SELECT
   FROM vaultevents.webhooks w
  WHERE (w.id = deliveries.webhook_id))));

CREATE POLICY own_account ON vaultevents.events TO vaultevents_api USING ((account_id = current_setting('vaultevents.account'::text, true)));

CREATE POLICY own_account ON vaultevents.flag_changes TO vaultevents_api USING ((EXISTS ( SELECT
   FROM vaultevents.webhooks w
  WHERE (w.id = flag_changes.webhook_id))));

CREATE POLICY own_account ON vaultevents.idempotent_answers TO vaultevents_api USING ((account_id = current_setting('vaultevents.account'::text, true)));

CREATE POLICY own_account ON vaultevents.leases TO vaultevents_api USING ((EXISTS ( SELECT
   FROM vaultevents.webhooks w
  WHERE (w.id = leases.webhook_id))));

CREATE POLICY own_account ON vaultevents.mfa_factors TO vaultevents_api USING ((account_id = current_setting('vaultevents.account'::text, true)));

CREATE POLICY own_account ON vaultevents.notices TO vaultevents_api USING ((EXISTS ( SELECT
   FROM vaultevents.webhooks w
  WHERE (w.id = notices.webhook_id))));

CREATE POLICY own_account ON vaultevents.pruned TO vaultevents_api USING ((EXISTS ( SELECT
   FROM vaultevents.webhooks w
  WHERE (w.id = pruned.webhook_id))));

CREATE POLICY own_account ON vaultevents.queue TO vaultevents_api USING ((EXISTS ( SELECT
   FROM vaultevents.webhooks w
  WHERE (w.id = queue.webhook_id))));

CREATE POLICY own_account ON vaultevents.resends TO vaultevents_api USING ((EXISTS ( SELECT
   FROM vaultevents.webhooks w
  WHERE (w.id = resends.webhook_id))));

CREATE POLICY own_account ON vaultevents.used_tokens TO vaultevents_api USING ((account_id = current_setting('vaultevents.account'::text, true)));

CREATE POLICY own_account ON vaultevents.vault_spans TO vaultevents_api USING ((account_id = current_setting('vaultevents.account'::text, true)));

CREATE POLICY own_account ON vaultevents.vaults TO vaultevents_api USING ((account_id = current_setting('vaultevents.account'::text, true)));

CREATE POLICY own_account ON vaultevents.webhook_revisions TO vaultevents_api USING ((account_id = current_setting('vaultevents.account'::text, true)));

CREATE POLICY own_account ON vaultevents.webhook_secrets TO vaultevents_api USING ((EXISTS ( SELECT
   FROM vaultevents.webhooks w
  WHERE (w.id = webhook_secrets.webhook_id))));

CREATE POLICY own_account ON vaultevents.webhooks TO vaultevents_api USING ((account_id = current_setting('vaultevents.account'::text, true)));
ALTER TABLE vaultevents.pruned ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.queue ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.resends ENABLE ROW LEVEL SECURITY;

CREATE POLICY unfinished ON vaultevents.resends AS RESTRICTIVE FOR DELETE TO vaultevents_api USING ((finished_at IS NULL));
ALTER TABLE vaultevents.used_tokens ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.vault_spans ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.vaults ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.webhook_revisions ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.webhook_secrets ENABLE ROW LEVEL SECURITY;
ALTER TABLE vaultevents.webhooks ENABLE ROW LEVEL SECURITY;
GRANT USAGE ON SCHEMA vaultevents TO vaultevents_api;
REVOKE ALL ON FUNCTION vaultevents.append_audit_entry(new_actor text, new_action text, new_subject text, new_account text, new_before bytea, new_after bytea) FROM PUBLIC;
GRANT ALL ON FUNCTION vaultevents.append_audit_entry(new_actor text, new_action text, new_subject text, new_account text, new_before bytea, new_after bytea) TO vaultevents_api;
REVOKE ALL ON FUNCTION vaultevents.replace_secret(webhook text, new_key_id text, new_sealed bytea, overlap_s double precision) FROM PUBLIC;
GRANT ALL ON FUNCTION vaultevents.replace_secret(webhook text, new_key_id text, new_sealed bytea, overlap_s double precision) TO vaultevents_api;
GRANT SELECT ON TABLE vaultevents.accounts TO vaultevents_api;
GRANT SELECT ON TABLE vaultevents.attempts TO vaultevents_api;
GRANT SELECT,UPDATE ON TABLE vaultevents.deliveries TO vaultevents_api;
GRANT SELECT ON TABLE vaultevents.events TO vaultevents_api;
GRANT SELECT ON TABLE vaultevents.feed TO vaultevents_api;
GRANT INSERT(webhook_id) ON TABLE vaultevents.flag_changes TO vaultevents_api;
GRANT INSERT(switched_on) ON TABLE vaultevents.flag_changes TO vaultevents_api;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE vaultevents.idempotent_answers TO vaultevents_api;
GRANT SELECT ON TABLE vaultevents.leases TO vaultevents_api;
GRANT SELECT ON TABLE vaultevents.mfa_factors TO vaultevents_api;
GRANT UPDATE(last_step) ON TABLE vaultevents.mfa_factors TO vaultevents_api;
GRANT UPDATE(failures) ON TABLE vaultevents.mfa_factors TO vaultevents_api;
GRANT UPDATE(locked_until) ON TABLE vaultevents.mfa_factors TO vaultevents_api;
GRANT INSERT(kind) ON TABLE vaultevents.notices TO vaultevents_api;
GRANT INSERT(webhook_id) ON TABLE vaultevents.notices TO vaultevents_api;
GRANT INSERT(reason) ON TABLE vaultevents.notices TO vaultevents_api;
GRANT INSERT(count) ON TABLE vaultevents.notices TO vaultevents_api;
GRANT INSERT(failures) ON TABLE vaultevents.notices TO vaultevents_api;
GRANT INSERT(failing_since) ON TABLE vaultevents.notices TO vaultevents_api;
GRANT SELECT ON TABLE vaultevents.pruned TO vaultevents_api;
GRANT SELECT,INSERT,DELETE ON TABLE vaultevents.queue TO vaultevents_api;
GRANT SELECT ON TABLE vaultevents.registry TO vaultevents_api;
GRANT UPDATE(filter_revision) ON TABLE vaultevents.registry TO vaultevents_api;
GRANT SELECT,DELETE ON TABLE vaultevents.resends TO vaultevents_api;
GRANT INSERT(webhook_id) ON TABLE vaultevents.resends TO vaultevents_api;
GRANT INSERT(event_seq) ON TABLE vaultevents.resends TO vaultevents_api;
GRANT INSERT(event_id) ON TABLE vaultevents.resends TO vaultevents_api;
GRANT INSERT(body) ON TABLE vaultevents.resends TO vaultevents_api;
GRANT SELECT,INSERT ON TABLE vaultevents.used_tokens TO vaultevents_api;
GRANT SELECT ON TABLE vaultevents.vault_spans TO vaultevents_api;
GRANT SELECT ON TABLE vaultevents.vaults TO vaultevents_api;
GRANT SELECT,INSERT ON TABLE vaultevents.webhook_revisions TO vaultevents_api;
GRANT INSERT,DELETE ON TABLE vaultevents.webhook_secrets TO vaultevents_api;
GRANT SELECT(webhook_id) ON TABLE vaultevents.webhook_secrets TO vaultevents_api;
GRANT SELECT(created_at) ON TABLE vaultevents.webhook_secrets TO vaultevents_api;
GRANT SELECT(valid_until) ON TABLE vaultevents.webhook_secrets TO vaultevents_api;
GRANT SELECT,INSERT,UPDATE ON TABLE vaultevents.webhooks TO vaultevents_api;
