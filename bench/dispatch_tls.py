"""The rate of signed deliveries over TLS: `python3 dev.py bench dispatch-tls --json`.

As `dispatch`, on kept connections.
"""

from __future__ import annotations

import sys

from _result import print_result
from dispatch import measure

if __name__ == "__main__":
    sys.exit(print_result(measure("dispatch-tls", "https", 60_000, 0.5), as_json="--json" in sys.argv))
