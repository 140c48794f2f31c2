"""Names of the environment variables."""

from __future__ import annotations

from typing import Final

ENV_PREFIX: Final = "VAULTEVENTS_"
ENV_FILE: Final = f"{ENV_PREFIX}CONFIG"
CALL_KEY_VARIABLE: Final = f"{ENV_PREFIX}API_KEY"
CALL_URL_VARIABLE: Final = f"{ENV_PREFIX}API_URL"
"""What 'vaultevents call' reads besides its options; no settings."""
NEW_KEY_VARIABLE: Final = f"{ENV_PREFIX}NEW_MASTER_KEY"
"""What 'vaultevents rotate-master-key' reads besides its options; no setting."""
