create table console_links (
    digest bytea primary key check (octet_length(digest) = 32),
    made_by text not null,
    valid_until timestamptz not null
);
comment on table console_links is
    'Links of `vaultevents console` that were not used yet. Each is exchanged once for a session.';
comment on column console_links.digest is 'SHA-256 of the code in the link.';
comment on column console_links.made_by is 'Who asked for it, as in the audit log.';
comment on column console_links.valid_until is 'Until when it can be used.';

create table console_sessions (
    id text primary key,
    digest bytea not null unique check (octet_length(digest) = 32),
    made_by text not null,
    begun_at timestamptz not null default db_now(),
    valid_until timestamptz not null
);
comment on table console_sessions is 'Browsers that are logged in to the console.';
comment on column console_sessions.id is 'Random name of the session. It is no secret.';
comment on column console_sessions.digest is 'SHA-256 of the token in the browser''s cookie.';
comment on column console_sessions.made_by is 'Who asked for the link, as in the audit log.';
comment on column console_sessions.begun_at is 'When the link was used.';
comment on column console_sessions.valid_until is 'When the session ends.';
