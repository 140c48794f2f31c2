-- migrate:up
-- Another secret for a webhook of the session's account (decisions D2, A19), whole or not at all: the one before it stays
-- valid for `overlap_s`, at most a week, and what an earlier rotation left is erased, so that at most two are valid. Answers
-- until when the one before it is valid; null: the account has no such webhook.
--
-- The role of the API may call this and not write `valid_until` itself: no statement of its can keep a former secret alive.
-- The function runs as the owner of the tables, whom no policy of theirs holds, so it names the account.
create function replace_secret(webhook text, new_key_id text, new_sealed bytea, overlap_s double precision)
returns timestamptz language plpgsql security definer as $$
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

do $$
begin
    -- whoever calls it may have tables of the same names in a schema of his own, or temporary ones
    execute format('alter function replace_secret set search_path = %I, pg_temp', current_schema());
end $$;
revoke execute on function replace_secret from public;
grant execute on function replace_secret to vaultevents_api;
