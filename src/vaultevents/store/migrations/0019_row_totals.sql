-- migrate:up
-- How many events and deliveries there are, without counting them: each statement that adds or removes rows adds one row
-- here, with the difference. The sum is exact in every snapshot, and no writer waits for another. An update changes no
-- total, so claims and settles pay nothing.
--
--   row_totals  differences, some dozens of rows: now and then a statement replaces those that nobody holds by their sum

create table row_totals (
    id bigint generated always as identity primary key,
    counted text not null check (counted in ('events', 'deliveries')),
    difference bigint not null
);

create function count_rows() returns trigger
language plpgsql
as $$
#variable_conflict use_column
declare
    change bigint;
    entry bigint;
begin
    case tg_op
        when 'TRUNCATE' then select -coalesce(sum(difference), 0) from row_totals where counted = tg_table_name into change;
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

-- Making a trigger keeps writers out until this migration is committed, so that nothing is missed or counted twice.
create trigger count_inserted after insert on events
    referencing new table as changed for each statement execute function count_rows();
create trigger count_deleted after delete on events
    referencing old table as changed for each statement execute function count_rows();
create trigger count_truncated after truncate on events for each statement execute function count_rows();
create trigger count_inserted after insert on deliveries
    referencing new table as changed for each statement execute function count_rows();
create trigger count_deleted after delete on deliveries
    referencing old table as changed for each statement execute function count_rows();
create trigger count_truncated after truncate on deliveries for each statement execute function count_rows();

-- Counts the rows again. For a database whose rows were copied with its triggers off; writers wait meanwhile.
create function recount_rows() returns void
language plpgsql
as $$
begin
    lock table events, deliveries in share row exclusive mode;
    delete from row_totals;
    insert into row_totals (counted, difference)
        select 'events', count(*) from events union all select 'deliveries', count(*) from deliveries;
end $$;

select recount_rows();
