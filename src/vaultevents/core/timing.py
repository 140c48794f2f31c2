"""How long the phases of one attempt took."""

from __future__ import annotations

from typing import Final

import msgspec


class Timing(msgspec.Struct, frozen=True):
    """In ms; None for what a kept connection skips, or what was not reached. `first_byte_ms` counts from the start."""

    dns_ms: int | None = None
    connect_ms: int | None = None
    tls_ms: int | None = None
    first_byte_ms: int | None = None


NO_TIMING: Final = Timing()
