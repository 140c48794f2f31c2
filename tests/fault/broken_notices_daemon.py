"""Negative controls for test_notice_kills: daemons that send the operator too few or too many notices."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime
from uuid import UUID, uuid4

from msgspec.structs import replace

from vaultevents.cli import main
from vaultevents.dispatch.notifier import NoticeLane
from vaultevents.store.deliveries import Claim, ClaimRequest, Delivery
from vaultevents.store.notices import finish

claim, headers = NoticeLane.claim, NoticeLane._headers


async def finish_first(self: NoticeLane, request: ClaimRequest) -> Claim:
    claimed = await claim(self, request)
    for delivery in claimed.deliveries:
        await finish(self.database, UUID(delivery.event_id), delivery.lease, sent=True)
    return claimed


def post_renamed(self: NoticeLane, delivery: Delivery, at: datetime) -> Mapping[str, str]:
    return headers(self, replace(delivery, event_id=str(uuid4())), at)


BROKEN = {"finishes-first": ("claim", finish_first), "renames": ("_headers", post_renamed)}

if __name__ == "__main__":
    setattr(NoticeLane, *BROKEN[sys.argv.pop(1)])
    main()
