"""demo: the whole path on this machine, with a chain and receivers of its own, compared with their ground truth."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from vaultevents import config
from vaultevents.cli.console import JsonOption, put_json, say
from vaultevents.config import Settings
from vaultevents.core.events import EVENT_TYPES
from vaultevents.core.sealing import NONCE_BYTES, Secret
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.core.units import Address
from vaultevents.core.webhooks import Webhook
from vaultevents.daemon import Store, open_store, serve
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.receivers import Hook, Receivers, Reply, per_event
from vaultevents.devnet.world import World
from vaultevents.store import accounts, webhooks
from vaultevents.telemetry import configure_logging

HISTORY_BLOCKS, HISTORY_EVENTS = 200, 30
LIVE_BLOCKS, BLOCK_S = 12, 0.25
DRAIN_S = 60.0


def add_to(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    once: Annotated[bool, typer.Option(help="Stop when a short history and a few new blocks are delivered.")] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same chain.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """See it work: a small chain, an embedded database, the service and TLS receivers, all on this machine.

    Exit code 1 when an event was lost, invented, or did not verify.
    """
    configure_logging("warning")
    with tempfile.TemporaryDirectory(prefix="vaultevents-demo-", ignore_cleanup_errors=True) as directory:
        result = asyncio.run(_demo(Path(directory), seed, once=once, show=_shown(once=once, as_json=as_json)))
    if as_json:
        put_json(result)
    else:
        say(", ".join(f"{name}: {value}" for name, value in result.items()))
    if result["lost"] or result["extra"] or result["verified"] != result["deliveries"]:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A webhook of the demo and the receiver behind it."""

    webhook: Webhook
    hook: Hook

    def delivered(self) -> Counter[str]:
        return Counter(one.webhook_id for one in self.hook.accepted if one.verified)


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything that runs in the demo."""

    world: World
    settings: Settings
    subscribers: tuple[Subscriber, ...]
    began_at_s: float

    def wanted(self) -> set[tuple[str, str]]:
        """(webhook id, event id) of all that should be delivered by now, from the ground truth."""
        return {
            (subscriber.webhook.id, event_id)
            for account_id, event_id in self.world.expected()
            for subscriber in self.subscribers
            if subscriber.webhook.account_id == account_id
            and (subscriber.webhook.event_types is None or event_id.startswith(subscriber.webhook.event_types))
        }

    def got(self) -> set[tuple[str, str]]:
        return {(one.webhook.id, event_id) for one in self.subscribers for event_id in one.delivered()}

    def result(self) -> dict[str, Any]:
        wanted, got = self.wanted(), self.got()
        accepted = [request for one in self.subscribers for request in one.hook.accepted]
        types = Counter(
            next(name for name in EVENT_TYPES if event_id.startswith(name)) for event_id in {event for _, event in got}
        )
        return {
            "event_types": dict(sorted(types.items())),
            "deliveries": len(accepted),
            "verified": sum(request.verified for request in accepted),
            "lost": len(wanted - got),
            "extra": len(got - wanted),
            "seconds": round(time.monotonic() - self.began_at_s, 1),
        }


async def _demo(directory: Path, seed: int, *, once: bool, show: Callable[[Stage], None]) -> dict[str, Any]:
    stop = asyncio.Event()
    async with _stage(directory, seed) as stage, asyncio.TaskGroup() as group:
        serving = group.create_task(serve(stage.settings, stop))
        try:
            await _live(stage, once=once, show=show)
        except asyncio.CancelledError:  # Ctrl-C ends the show, not the accounting
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while stage.wanted() - stage.got():
                    show(stage)
                    await asyncio.sleep(0.05)
        show(stage)
        result = stage.result()
        stop.set()
        await serving
    return result


async def _live(stage: Stage, *, once: bool, show: Callable[[Stage], None]) -> None:
    """Mines blocks while the service follows: a few of them, or until Ctrl-C."""
    mined = 0
    while not once or mined < LIVE_BLOCKS:
        await asyncio.sleep(BLOCK_S)
        stage.world.step()
        mined += 1
        show(stage)


@asynccontextmanager
async def _stage(directory: Path, seed: int) -> AsyncIterator[Stage]:
    began_at_s = time.monotonic()
    world = World(seed)
    world.history(HISTORY_BLOCKS, HISTORY_EVENTS)
    receivers, node = Receivers(directory), ExecutionServer(world.chain)
    await receivers.start()
    url = await node.start()
    values = {
        "network": "devnet",
        "chain_id": world.chain.chain_id,
        "data_dir": directory,
        "execution": {"urls": [url], "poll_interval_s": 0.1},
        "delivery": {
            "allow": ["127.0.0.0/8:*"],
            "ca_file": receivers.ca_path,
            "schedule": "1s, 1s, 2s, 5s, 10s",
            "poll_interval_s": 0.2,
        },
    }
    settings = config.parse(values, "demo", env_prefix="VAULTEVENTS_DEMO_")  # never the operator's own database
    try:
        async with open_store(settings) as store:
            yield Stage(world, settings, tuple(await _register(store, world, receivers)), began_at_s)
    finally:
        await node.stop()
        await receivers.stop()


async def _register(store: Store, world: World, receivers: Receivers) -> list[Subscriber]:
    """Two accounts with their vaults, a webhook for each, one for claims alone, and one that fails at first."""
    for account_id in sorted({one.account_id for one in world.registrations}):
        await accounts.add_account(store.database, account_id, account_id.title())
    for one in world.registrations:
        queue = None if one.queue is None else Address(one.queue)
        await accounts.add_vault(
            store.database, one.account_id, one.vault_id, Address(one.address), queue, one.first_block
        )
    first, second = sorted({one.account_id for one in world.registrations})
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


def _shown(*, once: bool, as_json: bool) -> Callable[[Stage], None]:
    """How the demo is shown: not at all for machines, a live table on a terminal, a line now and then in a pipe."""
    console = Console()
    if as_json:
        return lambda _: None
    if not console.is_terminal:
        return _plain_lines()
    live = Live(console=console, auto_refresh=False)

    def show(stage: Stage) -> None:
        live.start()
        live.update(_table(stage), refresh=True)

    return show


def _plain_lines() -> Callable[[Stage], None]:
    said_at_s = 0.0

    def show(stage: Stage) -> None:
        nonlocal said_at_s
        if time.monotonic() - said_at_s >= 1:
            said_at_s = time.monotonic()
            say(_headline(stage))

    return show


def _headline(stage: Stage) -> str:
    chain = stage.world.chain
    return (
        f"block {chain.head.number}, final {chain.finalized_number}, "
        f"{len(stage.world.expected())} events, {len(stage.got())} of {len(stage.wanted())} deliveries verified"
    )


def _table(stage: Stage) -> Table:
    table = Table("webhook", "event types", "delivered", "tried again", "latest event", title=_headline(stage))
    for one in stage.subscribers:
        latest = one.hook.accepted[-1].webhook_id if one.hook.accepted else ""
        delivered = sum(one.delivered().values())
        table.add_row(
            one.webhook.id,
            ", ".join(one.webhook.event_types or ("all",)),
            str(delivered),
            str(len(one.hook.ledger) - delivered),
            latest[:60],
        )
    return table
