"""demo: the whole path on this machine, with a chain and receivers of its own, compared with their ground truth."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from vaultevents import config
from vaultevents.cli.options import JsonOption
from vaultevents.cli.service_check import check_beside_service
from vaultevents.cli.terminal import complete, console, put_json, say, stopping
from vaultevents.config import Settings
from vaultevents.console.sessions import new_link
from vaultevents.core.errors import ConfigError
from vaultevents.core.events import EVENT_TYPES
from vaultevents.core.sealing import NONCE_BYTES, Secret
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.core.units import Address
from vaultevents.core.webhooks import Webhook
from vaultevents.daemon import Running, serve
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.gateway import Gateway
from vaultevents.devnet.receivers import Hook, Received, Receivers, Reply, per_event
from vaultevents.devnet.simulation import Simulation
from vaultevents.store import accounts, webhooks
from vaultevents.store.clock import SimulatedClock
from vaultevents.store.postgres import layout
from vaultevents.telemetry import configure_logging
from vaultevents.wiring.database import Store, open_store

HISTORY_BLOCKS, HISTORY_EVENTS = 200, 30
LIVE_BLOCKS, BLOCK_S = 20, 0.25
VALIDATORS = 40
REPORT_EVERY = 30
LEAD_S = 40
"""How far the demo's chain is behind the clock at first: its live blocks come faster than its slots."""
DRAIN_S = 60.0
"""What has not arrived when nothing has for so long is lost."""
SERVER_GONE_S = 30.0
DEFAULT_SEED = 1
NEXT_STEPS = """\
What to do next:
  vaultevents init       write a configuration file that explains every setting
  vaultevents check      test the nodes, the database and the keys that it names
  vaultevents vault discover, account add, webhook add
                         choose what is watched, and where events go
  vaultevents run        watch and deliver; 'vaultevents console' prints a link to its console
"""


def demo(
    once: Annotated[
        bool, typer.Option("--once", help="End when a short history and a few new blocks are delivered.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="Repeat exactly: the same seed gives the same events, which happen from 2026-01-01 on."),
    ] = None,
    console_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the console; 0 takes a free one. None with --once.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """See it work, on this machine alone.

    A small chain, an embedded database, the service with its console and TLS receivers run until Ctrl-C, without any
    configuration, and leave nothing behind. The first delivery of each event type is shown in full. At the end, what
    was delivered is compared with the chain's own record: exit code 1 when an event was lost, invented, or did not
    verify.
    """
    configure_logging("warning")
    try:
        with tempfile.TemporaryDirectory(prefix="vaultevents-demo-", ignore_cleanup_errors=True) as directory:
            try:
                with _shown(as_json=as_json) as show:
                    port = None if once else console_port
                    result = complete(_demo(Path(directory), seed, port, once=once, show=show))
            finally:
                _wait_for_the_server(Path(directory) / "postgres")
    except OSError as error:
        raise ConfigError(
            f"no room for the demo in {tempfile.gettempdir()} ({error.strerror}): free some, or set TMPDIR"
        ) from None
    if as_json:
        put_json(result)
    else:
        say(NEXT_STEPS)
        types = ", ".join(f"{count} {name}" for name, count in result["event_types"].items())
        say(
            f"{result['deliveries']} deliveries, {result['verified']} verified ({types or 'no events'}); "
            f"{result['lost']} lost, {result['extra']} extra, in {result['seconds']} s"
        )
    if result["lost"] or result["extra"] or result["verified"] != result["deliveries"]:
        raise typer.Exit(1)


def _wait_for_the_server(directory: Path) -> None:
    """The server stops by itself when nobody uses it; its files must not be removed while it still writes them."""
    if not directory.exists():
        return
    give_up_at_s = time.monotonic() + SERVER_GONE_S
    while layout.is_held(layout.supervisor_lock(directory)) and time.monotonic() < give_up_at_s:
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A webhook of the demo and the receiver behind it."""

    webhook: Webhook
    hook: Hook

    def delivered(self) -> Counter[str]:
        return Counter(request.webhook_id for request in self.hook.accepted if request.verified)


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything that runs in the demo."""

    simulation: Simulation
    settings: Settings
    subscribers: tuple[Subscriber, ...]
    began_at_s: float
    clock: SimulatedClock | None

    def chain_time_s(self) -> float:
        """The present of the chain: that of this machine, or that of its blocks where they have to repeat exactly."""
        return time.time() if self.clock is None else self.clock.now().timestamp()

    def wanted(self) -> set[tuple[str, str]]:
        """(webhook id, event id) of all that should be delivered by now, from the ground truth."""
        return {
            (subscriber.webhook.id, event_id)
            for account_id, event_id in self.simulation.expected(now_s=self.chain_time_s())
            for subscriber in self.subscribers
            if subscriber.webhook.account_id == account_id
            and (subscriber.webhook.event_types is None or event_id.startswith(subscriber.webhook.event_types))
        }

    def got(self) -> set[tuple[str, str]]:
        return {
            (subscriber.webhook.id, event_id) for subscriber in self.subscribers for event_id in subscriber.delivered()
        }

    def result(self, wanted: set[tuple[str, str]]) -> dict[str, Any]:
        """What became of those that were wanted when it was last waited for; time goes on, and more come to be."""
        got = self.got()
        accepted = [request for subscriber in self.subscribers for request in subscriber.hook.accepted]
        types = Counter(
            next(name for name in EVENT_TYPES if event_id.startswith(name)) for event_id in {event for _, event in got}
        )
        return {
            "event_types": dict(sorted(types.items())),
            "deliveries": len(accepted),
            "verified": sum(request.verified for request in accepted),
            "lost": len(wanted - got),
            "extra": len(got - self.wanted()),
            "digest": digest((request.webhook_id, request.body) for request in accepted),
            "seconds": round(time.monotonic() - self.began_at_s, 1),
        }


def digest(events: Iterable[tuple[str, bytes]]) -> str:
    """Return the hash of the ids and bodies of events, whatever their order: with one seed it is always the same."""
    parts = (hashlib.sha256(event_id.encode() + b"\n" + body).digest() for event_id, body in set(events))
    return hashlib.sha256(b"".join(sorted(parts))).hexdigest()


async def _demo(
    directory: Path, seed: int | None, console_port: int | None, *, once: bool, show: Callable[[Stage], None]
) -> dict[str, Any]:
    ended, stop = asyncio.Event(), asyncio.Event()
    with stopping(ended):
        async with _stage(directory, seed, console_port) as stage, asyncio.TaskGroup() as group:
            serving = group.create_task(
                serve(stage.settings, stop, beside=_put_link, chain_clock=stage.clock, check=check_beside_service)
            )
            await _live(stage, ended, once=once, show=show)
            wanted = await _drained(stage, show)
            show(stage)
            result = stage.result(wanted)
            stop.set()
            await serving
    return result


async def _put_link(running: Running) -> None:
    """Show where the console is, with a link that logs in; a program that reads the output could not use it."""
    url = running.urls.get("console")
    if url is not None and sys.stdout.isatty():
        say(f"Console: {(await new_link(running.database, url)).url}")


async def _live(stage: Stage, ended: asyncio.Event, *, once: bool, show: Callable[[Stage], None]) -> None:
    """Mines blocks while the service follows: a few of them, or until Ctrl-C or SIGTERM, which end the show alone."""
    mined = 0
    while not ended.is_set() and not (once and mined >= LIVE_BLOCKS):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), BLOCK_S)
            return
        stage.simulation.step()
        mined += 1
        show(stage)


async def _drained(stage: Stage, show: Callable[[Stage], None]) -> set[tuple[str, str]]:
    """Waits until everything that is final has arrived, or nothing has for `DRAIN_S`; returns what was waited for."""
    wanted, got = stage.wanted(), stage.got()
    arrived_at_s = time.monotonic()
    while wanted - got and time.monotonic() - arrived_at_s < DRAIN_S:
        show(stage)
        await asyncio.sleep(0.05)
        before, wanted, got = len(got), stage.wanted(), stage.got()
        if len(got) > before:
            arrived_at_s = time.monotonic()
    return wanted


def simulated(seed: int | None) -> tuple[Simulation, SimulatedClock | None]:
    """Make the chain with its history. Without a seed its time is that of now, else it repeats exactly."""
    if seed is None:
        genesis_s = int(time.time()) - HISTORY_BLOCKS - LEAD_S  # slots of a second, so that its clock is about ours
        chain = Chain(DEFAULT_SEED, genesis_time_s=genesis_s, seconds_per_slot=1)
    else:
        chain = Chain(seed, seconds_per_slot=1)
    chosen = DEFAULT_SEED if seed is None else seed
    simulation = Simulation(chosen, chain=chain, validators=VALIDATORS, report_every=REPORT_EVERY)
    simulation.history(HISTORY_BLOCKS, HISTORY_EVENTS)
    return simulation, None if seed is None else SimulatedClock(lambda: chain.head.timestamp_s)


@asynccontextmanager
async def _stage(directory: Path, seed: int | None, console_port: int | None) -> AsyncIterator[Stage]:
    began_at_s = time.monotonic()
    simulation, clock = simulated(seed)
    receivers, node, beacon = Receivers(directory), ExecutionServer(simulation.chain), BeaconServer(simulation.beacon)
    gateway = Gateway(simulation.report_files)
    await receivers.start()
    url, beacon_url, gateway_url = await node.start(), await beacon.start(), await gateway.start()
    values = {
        "network": "devnet",
        "chain_id": simulation.chain.chain_id,
        "data_dir": directory,
        "execution": {"urls": [url], "poll_interval_s": 0.1},
        "beacon": {"urls": [beacon_url], "poll_interval_s": 0.2},
        "reports": {"gateways": [gateway_url], "poll_interval_s": 0.2},
        "contracts": {"lazy_oracles": [f"0x{simulation.lazy_oracle.hex()}"]},
        "delivery": {
            "allow": ["127.0.0.0/8:*"],
            "ca_file": receivers.ca_path,
            "schedule": "1s, 1s, 2s, 5s, 10s",
            "park_first_s": 1.0,  # as short as the schedule: one of the receivers refuses each event once
            "park_longest_s": 5.0,
            "poll_interval_s": 0.2,
        },
        "api": {"port": 0},
        "console": {"serve": "off"} if console_port is None else {"port": console_port},
        "metrics": {"port": 0},
    }
    settings = config.given(values, "demo")  # and nothing of the environment: never the operator's own database
    try:
        async with open_store(settings) as store:
            yield Stage(simulation, settings, tuple(await _register(store, simulation, receivers)), began_at_s, clock)
    finally:
        await node.stop()
        await beacon.stop()
        await gateway.stop()
        await receivers.stop()


async def _register(store: Store, simulation: Simulation, receivers: Receivers) -> list[Subscriber]:
    """Two accounts with their vaults, a webhook for each, one for claims alone, and one that fails at first."""
    for account_id in sorted({registration.account_id for registration in simulation.registrations}):
        await accounts.add_account(store.database, account_id, account_id.title())
    for registration in simulation.registrations:
        queue = None if registration.queue is None else Address(registration.queue)
        await accounts.add_vault(
            store.database,
            registration.account_id,
            registration.vault_id,
            Address(registration.address),
            queue,
            registration.first_block,
        )
    first, second = sorted({registration.account_id for registration in simulation.registrations})
    return [
        await _subscribe(store, receivers.hook("all-of-acme"), first, None),
        await _subscribe(store, receivers.hook("claims-of-acme"), first, ("withdrawal_claimed",)),
        await _subscribe(store, receivers.hook("all-of-borealis"), second, None),
        await _subscribe(store, receivers.hook("fails-once", per_event(Reply(503), Reply())), second, None),
    ]


async def _subscribe(store: Store, hook: Hook, account_id: str, event_types: tuple[str, ...] | None) -> Subscriber:
    webhook = Webhook(f"wh-{hook.url.rsplit('/', 1)[1]}", account_id, hook.url, event_types, None, active=True)
    secret = Secret(new_secret(secrets.token_bytes(SECRET_BYTES)))
    hook.secret = secret.reveal()
    await webhooks.create_webhook(store.database, webhook, secret, store.key, secrets.token_bytes(NONCE_BYTES))
    return Subscriber(webhook, hook)


@contextlib.contextmanager
def _shown(*, as_json: bool) -> Iterator[Callable[[Stage], None]]:
    """How the demo is shown: not at all for machines, a live table on a terminal, a line now and then in a pipe."""
    if as_json:
        yield lambda _: None
    elif not sys.stdout.isatty():
        yield _plain_lines()
    else:
        samples = Samples()
        with Live(console=console(live=True), auto_refresh=False) as live:

            def show(stage: Stage) -> None:
                samples.put_new(stage)  # above the table
                live.update(_table(stage), refresh=True)

            yield show


class Samples:
    """Show the first delivery of each event type in full."""

    def __init__(self) -> None:
        self._missing = set(EVENT_TYPES)

    def put_new(self, stage: Stage) -> None:
        """Show the types that were delivered since the last call."""
        if not self._missing:
            return
        for subscriber in stage.subscribers:
            for received in subscriber.hook.accepted:
                event_type = next(name for name in EVENT_TYPES if received.webhook_id.startswith(name))
                if received.verified and event_type in self._missing:
                    self._missing.remove(event_type)
                    say(as_sent(event_type, subscriber.hook.url, received))


def as_sent(event_type: str, url: str, received: Received) -> str:
    """Write a request as it was sent: all headers, and the body with line breaks for reading."""
    origin, _, path = url.rpartition("/")
    body = json.dumps(json.loads(received.body), indent=2, ensure_ascii=False)
    headers = "\n".join(f"{name}: {value}" for name, value in received.headers.items())
    size = f"sent as {len(received.body)} bytes on one line"
    return f"\n--- {event_type}: delivered to {origin}, verified; {size}\nPOST /{path}\n{headers}\n\n{body}\n"


def _plain_lines() -> Callable[[Stage], None]:
    samples, said_at_s = Samples(), 0.0

    def show(stage: Stage) -> None:
        nonlocal said_at_s
        samples.put_new(stage)
        if time.monotonic() - said_at_s >= 1:
            said_at_s = time.monotonic()
            say(_headline(stage))

    return show


def _headline(stage: Stage) -> str:
    chain, wanted = stage.simulation.chain, stage.wanted()
    return (
        f"block {chain.head.number}, final {chain.finalized_number}, {len({event for _, event in wanted})} events, "
        f"{len(stage.got())} of {len(wanted)} deliveries verified"
    )


def _table(stage: Stage) -> Table:
    table = Table("webhook", "event types", "delivered", "tried again", "latest event", title=_headline(stage))
    for subscriber in stage.subscribers:
        latest = subscriber.hook.accepted[-1].webhook_id if subscriber.hook.accepted else ""
        delivered = sum(subscriber.delivered().values())
        table.add_row(
            subscriber.webhook.id,
            ", ".join(subscriber.webhook.event_types or ("all",)),
            str(delivered),
            str(len(subscriber.hook.ledger) - delivered),
            latest[:60],
        )
    return table
