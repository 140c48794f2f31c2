-- migrate:up
select 1;
