-- The audit log: every administrative act, in a chain of hashes.

create table audit_log (
    seq bigint primary key,
    at timestamptz not null,
    actor text not null check (actor <> '' and octet_length(actor) <= 200),
    action text not null check (action ~ '^[a-z][a-z_]*(\.[a-z_]+)?$'),
    subject text not null check (octet_length(subject) <= 20000),
    account_id text,
    before_digest bytea check (octet_length(before_digest) = 32),
    after_digest bytea check (octet_length(after_digest) = 32),
    previous_hash bytea not null unique check (octet_length(previous_hash) = 32),
    hash bytea not null unique check (octet_length(hash) = 32)
);
create index audit_log_by_account on audit_log (account_id, seq);
comment on table audit_log is
    'Administrative acts. Append-only: each row is written in the transaction of its change, and links to the row '
    'before it. Rows refer to nothing, so that they outlive what they are about.';
comment on column audit_log.seq is 'Number of the row, from 1 without a gap.';
comment on column audit_log.at is 'When the act was recorded.';
comment on column audit_log.actor is
    'Who acted: `cli:` and the user of the operating system, `api:` and the API key''s id, `console:` and the '
    'session''s id, or `service`: automatic.';
comment on column audit_log.action is 'What was done, such as `webhook.enable`.';
comment on column audit_log.subject is 'What was changed, by its id.';
comment on column audit_log.account_id is 'Account of the subject. Null: none, or several.';
comment on column audit_log.before_digest is
    'SHA-256 of the canonical JSON of the state before, without secrets. Null: there was none.';
comment on column audit_log.after_digest is
    'SHA-256 of the canonical JSON of the state afterwards, without secrets. Null: there is none.';
comment on column audit_log.previous_hash is '`hash` of the row before. The first row: 32 zero bytes.';
comment on column audit_log.hash is
    'SHA-256 of previous_hash, seq, at, actor, action, subject, account_id, before_digest and after_digest, as '
    'audit_field() encodes each of them.';

create function audit_field(content bytea) returns bytea language sql immutable as
    $$select coalesce(int4send(octet_length(content)) || content, '\xffffffff'::bytea)$$;
comment on function audit_field is
    'Encode a field of an audit log entry for its hash: the number of its bytes in 4 bytes, big-endian, then the '
    'bytes. Null: ff ff ff ff.';

create function append_audit_entry(
    new_actor text, new_action text, new_subject text, new_account text, new_before bytea, new_after bytea
) returns bigint language plpgsql security definer as $$
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
comment on function append_audit_entry is
    'Append an entry to the audit log and return its number. Locks the log until the transaction ends, so that the '
    'chain has one end: call it last. Runs as the owner of the tables, so that the API role can append and neither '
    'read nor change.';

create function refuse_audit_change() returns trigger language plpgsql as $$
begin
    raise exception 'the audit log is append-only: nothing of it is changed or removed';
end $$;
comment on function refuse_audit_change() is 'Trigger: refuse every change of the audit log but an append.';
create trigger refuse_change before update or delete or truncate on audit_log
    for each statement execute function refuse_audit_change();
alter table audit_log enable always trigger refuse_change;  -- also in a session that replicates

do $$
begin
    execute format('alter function append_audit_entry set search_path = %I, pg_temp', current_schema());
end $$;
revoke execute on function append_audit_entry from public;
grant execute on function append_audit_entry to vaultevents_api;
alter table audit_log enable row level security;  -- no policy: nothing for the role of the API
