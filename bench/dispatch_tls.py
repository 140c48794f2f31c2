"""The rate of signed deliveries over TLS: `python3 dev.py bench dispatch-tls --json`.

As `dispatch`, on kept connections.
"""

from __future__ import annotations

import sys

from dispatch import main, measure

if __name__ == "__main__":
    sys.exit(main(measure("dispatch-tls", "https", 60_000, 0.5), sys.argv[1:]))
