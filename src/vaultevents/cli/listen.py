"""listen: a receiver of one's own to try webhooks with, before there is a real one."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer

from vaultevents.cli.console import JsonOption, put_json, say
from vaultevents.core.errors import InputError
from vaultevents.core.signing import sign
from vaultevents.devnet.receivers import Received, Receivers


def add_to(app: typer.Typer) -> None:
    app.command("listen")(listen)


def listen(
    secret: Annotated[str, typer.Option(help="The webhook's secret, as 'webhook add' showed it.")],
    port: Annotated[int, typer.Option(min=1, max=65535)] = 9443,
    directory: Annotated[Path, typer.Option(help="Where the certificate files are written.", file_okay=False)] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Receive webhooks at https://127.0.0.1:PORT/hook, verify and print them. Ends with Ctrl-C."""
    try:
        sign([secret], "probe", 0, b"")
    except ValueError as problem:
        raise InputError(f"--secret: {problem}; copy it again, with its whsec_") from None
    try:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_listen(secret, port, directory, as_json=as_json))
    except OSError as problem:
        raise InputError(
            f"cannot listen on port {port} with certificates in {directory} ({problem.strerror}): "
            "choose another port or directory"
        ) from None


async def _listen(secret: str, port: int, directory: Path, *, as_json: bool) -> None:
    receivers = Receivers(directory)
    try:
        origin = await receivers.start(port)
        hook = receivers.hook("hook")
        hook.secret = secret
        if not as_json:
            say(f"Listening at {origin}/hook; let the service trust {receivers.ca_path} (delivery.ca_file).")
        shown = 0
        while True:
            for received in (await hook.arrivals(shown + 1, timeout_s=float("inf")))[shown:]:
                _show(received, as_json=as_json)
                shown += 1
    finally:
        await receivers.stop()


def _show(received: Received, *, as_json: bool) -> None:
    if as_json:
        put_json({"id": received.webhook_id, "verified": received.verified, "body": received.body.decode()})
    else:
        say(f"{'verified' if received.verified else 'DOES NOT VERIFY'}: {received.body.decode(errors='replace')}")
