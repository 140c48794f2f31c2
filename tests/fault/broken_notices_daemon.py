"""Negative controls for test_notice_kills: daemons that tell the operator too little or too much, named by argument."""

from __future__ import annotations

import sys
from dataclasses import replace
from uuid import uuid4

from vaultevents.cli import main
from vaultevents.dispatch.notifier import Notifier, OperatorWebhook
from vaultevents.store.notices import ClaimedNotice, finish

post = Notifier._post


async def finish_first(self: Notifier, webhook: OperatorWebhook, notice: ClaimedNotice) -> None:
    await finish(self._database, notice, sent=True)
    await post(self, webhook, notice)


async def post_renamed(self: Notifier, webhook: OperatorWebhook, notice: ClaimedNotice) -> None:
    await post(self, webhook, replace(notice, id=uuid4()))
    await finish(self._database, notice, sent=True)


BROKEN = {"finishes-first": finish_first, "renames": post_renamed}

if __name__ == "__main__":
    Notifier._post = BROKEN[sys.argv.pop(1)]  # type: ignore[method-assign]
    main()
