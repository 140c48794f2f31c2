"""The present schema as `pg_dump` shows it: `python3 dev.py schema` writes it to `src/vaultevents/store/schema.sql`."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import tempfile
from pathlib import Path

from store_factories import own_database
from vaultevents.store.postgres.embedded import EmbeddedPostgres, ServerAddress, find_install

PICTURE = Path(__file__).parents[1] / "src" / "vaultevents" / "store" / "schema.sql"

HEADER = """\
-- The present schema. Generated from the migrations by `python3 dev.py schema`; do not edit.
"""

_NOISE = re.compile(r"^(--.*|SET .*|SELECT pg_catalog\.set_config.*|\\(un)?restrict .*|ALTER .* OWNER TO .*)?\n", re.M)
"""Comments, session settings, owners, and the random token of `\\restrict`."""
_BODY = re.compile(r"\$\w*\$.*?\$\w*\$", re.DOTALL)
_BEGINS = re.compile(r"^(CREATE (?:TABLE|FUNCTION|TRIGGER|INDEX|UNIQUE|POLICY).*)", re.M)


async def picture(server: ServerAddress) -> str:
    """Migrate a new schema and return it as SQL, without what differs between servers and runs."""
    async with own_database(server) as database:
        async with database.statement() as connection:
            schema, name = await connection.fetchrow("select current_schema, current_database()")
        dumped = await asyncio.to_thread(_dump, server, name, schema)
    return HEADER + "\n" + _readable(dumped, schema)


def _dump(server: ServerAddress, database: str, schema: str) -> str:
    to = server.connect_kwargs()
    command = [
        str(find_install("18") / "bin" / "pg_dump"),
        *("--schema-only", "--schema", schema),
        *("--host", to["host"], "--port", str(to["port"]), "--username", to["user"]),
        database,
    ]
    environment = {**os.environ, "PGPASSWORD": to["password"]}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def _readable(dumped: str, schema: str) -> str:
    """Drop the noise outside function bodies, and put an empty line before each statement that creates something."""
    bodies = _BODY.findall(dumped)
    text = _BEGINS.sub(r"\n\1", _NOISE.sub("", _BODY.sub("@body@", dumped)))
    for body in bodies:
        text = text.replace("@body@", body, 1)
    return re.sub(rf"\b{schema}\b", "vaultevents", text).strip() + "\n"


def _write() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedPostgres(Path(directory) / "postgres", durable=False) as server,
    ):
        PICTURE.write_text(asyncio.run(picture(server)), encoding="utf-8")
    print(PICTURE)


if __name__ == "__main__":
    _write()
