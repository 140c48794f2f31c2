create table deposit_searches (
    id bigint generated always as identity primary key,
    vaults bytea[] not null,
    position bigint not null,
    anchor bytea check (octet_length(anchor) = 32),
    next_deposit bigint,
    last_deposit_block bigint
);
comment on table deposit_searches is
    'How far the deposits of registered vaults were read, where the beacon node does not give all validators.';
comment on column deposit_searches.id is 'Search id.';
comment on column deposit_searches.vaults is 'Addresses whose deposits are looked for.';
comment on column deposit_searches.position is 'Last block that was read.';
comment on column deposit_searches.anchor is 'Hash of that block. Null: not known.';
comment on column deposit_searches.next_deposit is
    'Index of the next deposit of the deposit contract, of which none may be missing. Null: none was seen.';
comment on column deposit_searches.last_deposit_block is 'Block of the deposit before it. Null: none was seen.';

create table deposits (
    pubkey bytea not null check (octet_length(pubkey) = 48),
    vault bytea not null check (octet_length(vault) = 20),
    block_number bigint not null,
    primary key (pubkey, vault)
);
comment on table deposits is
    'Public keys that were deposited for registered vaults. Whether such a validator pays its vault is in `validators`.';
comment on column deposits.pubkey is 'BLS public key, 48 bytes.';
comment on column deposits.vault is 'Address in the withdrawal credentials of the deposit.';
comment on column deposits.block_number is 'Block of the first deposit.';

alter table discovery
    add column source text not null default 'list' check (source in ('list', 'deposits')),
    add column list_refused text;
comment on column discovery.source is 'Where validators are found: the list of all validators, or deposits.';
comment on column discovery.list_refused is 'How a beacon node refused the list. Null: it did not, or was not asked.';
