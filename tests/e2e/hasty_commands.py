"""The command line with short pauses after failures: as many attempts as always, in less time."""

from __future__ import annotations

from vaultevents.cli import main
from vaultevents.watch import watcher

if __name__ == "__main__":
    watcher.BACKOFF_S = (0.01, 0.02, 0.05, 0.1, 0.1, 0.1)
    main()
