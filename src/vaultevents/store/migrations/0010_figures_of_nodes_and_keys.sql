-- For operators: how far nodes are behind and how fast they answer, and when API keys were last used.

alter table nodes
    add column behind bigint check (behind >= 0),
    add column behind_at timestamptz,
    add column latency_p50_s double precision check (latency_p50_s >= 0),
    add column latency_p95_s double precision check (latency_p95_s >= 0),
    add check ((behind is null) = (behind_at is null)),
    add check ((latency_p50_s is null) = (latency_p95_s is null));
comment on column nodes.behind is
    'By how many blocks or slots its head was behind the newest head of a node of its kind. Null: not known.';
comment on column nodes.behind_at is 'When it showed that head.';
comment on column nodes.latency_p50_s is
    'Median time from a request to its whole answer, in seconds, over its last answers. Null: none yet.';
comment on column nodes.latency_p95_s is '95th percentile of the same times.';

create table api_key_uses (
    api_key_id text primary key references api_keys,
    used_at timestamptz not null
);
comment on table api_key_uses is
    'When API keys were last used. Written once a minute by each API process, apart from api_keys, so that neither '
    'caches nor the audit log see a change of the key.';
comment on column api_key_uses.api_key_id is 'The API key.';
comment on column api_key_uses.used_at is 'When the API last accepted a request with it.';
