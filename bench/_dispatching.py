"""The dispatcher as the daemon runs it, in a process of its own: `_dispatching.py FOLDER`, until its stdin ends."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from _delivery import KEY, PlainGuard
from yarl import URL

from vaultevents import config
from vaultevents.api.server import bind, serve
from vaultevents.cli.terminal import stop_at_end_of
from vaultevents.console.app import build
from vaultevents.console.context import ConsoleContext
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.daemon import console_options
from vaultevents.dispatch.attempts import Dispatcher
from vaultevents.dispatch.lanes import DeliveryLane, DispatchOptions
from vaultevents.dispatch.sender import Sender
from vaultevents.dispatch.signer import Signer
from vaultevents.egress import Guard
from vaultevents.store.clock import ServiceClock
from vaultevents.store.pool import Database, open_database
from vaultevents.telemetry import configure_logging
from vaultevents.wiring.process_memory import tune_memory
from vaultevents.wiring.sources import open_sources


@asynccontextmanager
async def console(url: str | None, database: Database) -> AsyncIterator[None]:
    """The console at this URL, beside the dispatcher as in the daemon; nothing without a URL."""
    if url is None:
        yield
        return
    values = {"network": "devnet", "chain_id": 1337, "console": {"port": URL(url).port}}
    settings, stop = config.given(values, "bench"), asyncio.Event()
    sources = partial(open_sources, settings, database, ServiceClock(await database.now()))
    context = ConsoleContext(database, settings, KEY, time.time, stop, sources=sources)
    options = console_options(settings)
    serving = asyncio.create_task(serve(build(context), bind(options), options, time.time, stop))
    yield
    stop.set()
    await serving


async def dispatch(facts: dict[str, Any]) -> None:
    database = await open_database(facts["database"], schema=facts["schema"])
    clock = ServiceClock(await database.now())
    rules = UrlRules(allow=(parse_allow("127.0.0.1:*"),))
    guard = Guard(rules) if facts["scheme"] == "https" else PlainGuard(rules)
    ca_file = Path(facts["ca_file"]) if facts["scheme"] == "https" else None
    stop = asyncio.Event()
    stop_at_end_of(sys.stdin, stop)
    options = DispatchOptions(**facts["options"])
    async with Sender(guard, ca_file=ca_file) as sender, console(facts.get("console_url"), database):
        tune_memory()
        print("ready", flush=True)
        lane = DeliveryLane(database, Signer({KEY.id: KEY}), options, random.Random(1))
        await Dispatcher(lane, sender, clock).run(stop)
    await database.close()


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    configure_logging("warning")
    uvloop.run(dispatch(json.loads(Path(sys.argv[1], "facts.json").read_text())))
