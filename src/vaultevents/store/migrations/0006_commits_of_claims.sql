-- A claim, and an attempt that was accepted, commit without waiting for the disk.

create function commit_without_wait(claimed bigint) returns boolean
language plpgsql
as $$
begin
    if exists (select from events where near_head) then
        return false;
    end if;
    perform set_config('synchronous_commit', 'off', true);
    return true;
end $$;
comment on function commit_without_wait(bigint) is
    'Let this transaction, which claimed so many deliveries, commit before it is on disk, unless there are events near '
    'the head. If PostgreSQL crashes, claims and accepted attempts of the last second are forgotten: their deliveries '
    'are attempted again, under the same id. Near the head it must be remembered which attempts were started, since '
    'the event may be orphaned. The argument makes sure that the claim comes first.';
