"""What `status` says of the audit behind a stream, which must not claim what was not done."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from vaultevents.cli.status import audit_line
from vaultevents.store.status import CursorFacts

pytestmark = pytest.mark.integration


def cursor(kind: str, first: int, position: int) -> CursorFacts:
    return CursorFacts("logs", kind, first, position, None, datetime.now(UTC), None, None, "http://node#1", None)


@pytest.mark.parametrize(
    ("first", "position", "live", "per_s", "line"),
    [
        (
            1,
            0,
            100,
            20.0,
            "nothing was asked for again, 100 are left (at most 20 a second: 0.0 h)",
        ),
        (
            1,
            0,
            100,
            0.0,
            "nothing was asked for again, 100 blocks were not: it is off (execution.audit_blocks_per_s)",
        ),
        (
            1,
            90,
            100,
            20.0,
            "blocks 1 to 90 were asked for again: whole, and follows the finalized block",
        ),
        (1, 90, 100, 0.0, "blocks 1 to 90 were asked for again, 10 blocks were not: it is off"),
        (
            1,
            90,
            72_090,
            20.0,
            "blocks 1 to 90 were asked for again, 72000 are left (at most 20 a second: 1.0 h)",
        ),
    ],
)
def test_the_audit_claims_what_it_has_read(first: int, position: int, live: int, per_s: float, line: str) -> None:
    lives = [cursor("live", first, live)]
    shown = audit_line(cursor("audit", first, position), lives, per_s)
    assert shown.startswith(f"logs at http://node#1: {line}")
