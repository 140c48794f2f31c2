"""listen: a receiver of one's own to try webhooks with, before there is a real one."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vaultevents.cli.local_receiver import show_all, show_received
from vaultevents.cli.terminal import complete, put_json, say, stopping
from vaultevents.core.errors import InputError
from vaultevents.core.signing import sign
from vaultevents.devnet.receivers import Received, Receivers


def listen(
    secret: Annotated[str, typer.Option(help="The webhook's secret, as 'webhook add' showed it.", metavar="SECRET")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where to listen.", metavar="PORT")] = 9443,
    directory: Annotated[
        Path,
        typer.Option(
            help="Where ca.pem and server.pem are written, anew at each start (default: here).",
            file_okay=False,
            show_default=False,
            metavar="DIRECTORY",
        ),
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on a line for each webhook.")] = False,
) -> None:
    """Receive, verify and print webhooks on this machine.

    A receiver to try things with, at https://127.0.0.1:PORT/hook until Ctrl-C or SIGTERM. The service must trust it:
    name its ca.pem as delivery.ca_file.
    """
    try:
        sign([secret], "probe", 0, b"")
    except ValueError as problem:
        raise InputError(f"--secret: {problem}; copy it again, with its whsec_") from None
    try:
        complete(_listen(secret, port, directory, as_json=as_json))
    except OSError as problem:
        raise InputError(
            f"cannot listen on port {port} with certificates in {directory} ({problem.strerror}): "
            "choose another port or directory"
        ) from None


async def _listen(secret: str, port: int, directory: Path, *, as_json: bool) -> None:
    receivers, stop = Receivers(directory), asyncio.Event()
    try:
        origin = await receivers.start(port)
        hook = receivers.hook("hook")
        hook.secret = secret
        if not as_json:
            say(f"Listening at {origin}/hook; let the service trust {receivers.ca_path} (delivery.ca_file).")
        with stopping(stop):
            showing = asyncio.create_task(show_all(hook, partial(_show, as_json=as_json)))
            ended = asyncio.create_task(stop.wait())
            await asyncio.wait((showing, ended), return_when=asyncio.FIRST_COMPLETED)
            for task in (showing, ended):
                task.cancel()
            if showing.done():
                showing.result()
    finally:
        await receivers.stop()


def _show(received: Received, *, as_json: bool) -> None:
    if as_json:
        put_json(
            {"id": received.webhook_id, "verified": received.verified, "body": received.body.decode(errors="replace")}
        )
    else:
        show_received(received)
