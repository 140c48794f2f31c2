"""Negative control for test_demo: a demo whose sender drops one delivery, and spoils the signature of another."""

from __future__ import annotations

from collections.abc import Mapping

from vaultevents.cli import demo, main
from vaultevents.dispatch.sender import Reply, Sender

send = Sender.send
attempts = 0


async def drop_or_spoil(self: Sender, url: str, body: bytes, headers: Mapping[str, str], owner: str = "") -> Reply:
    global attempts
    attempts += 1
    if attempts == 1:
        return Reply(200, None, None, "", 1, None)
    if attempts == 2:
        headers = {**headers, "webhook-signature": "v1,c3BvaWxlZA=="}
    return await send(self, url, body, headers, owner)


if __name__ == "__main__":
    Sender.send = drop_or_spoil  # type: ignore[method-assign]
    demo.LIVE_BLOCKS, demo.DRAIN_S = 1, 15.0  # everything but the two has arrived by then, on a busy machine, too
    main()
