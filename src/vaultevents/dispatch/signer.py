"""Opens the secrets of webhooks and signs with them (rules D1, D2 and D12)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache

from vaultevents import __version__
from vaultevents.core.sealing import MasterKey, SealBroken, open_sealed
from vaultevents.core.signing import delivery_headers
from vaultevents.store.deliveries import Delivery, SealedSecret


class Signer:
    """Knows the master keys by their ids; keeps opened secrets in memory, each by the very bytes that were sealed."""

    def __init__(self, keys: Mapping[str, MasterKey], plain_header: str | None = None) -> None:
        self._plain_header = plain_header

        @lru_cache(maxsize=4096)
        def opened(webhook_id: str, secrets: tuple[SealedSecret, ...]) -> tuple[str, ...]:
            if missing := [secret.key_id for secret in secrets if secret.key_id not in keys]:
                raise SealBroken(f"a secret is sealed with the master key {missing[0]}, which is not at hand")
            return tuple(open_sealed(keys[secret.key_id], secret.sealed, webhook_id).reveal() for secret in secrets)

        self._opened = opened

    def headers(self, delivery: Delivery, at: datetime) -> dict[str, str]:
        """Return all headers of an attempt made at `at`. Raises `SealBroken` when a secret cannot be opened."""
        return delivery_headers(
            secret_texts=self._opened(delivery.target.webhook_id, delivery.target.secrets),
            webhook_id=delivery.event_id,
            timestamp_s=int(at.timestamp()),
            body=delivery.body,
            attempt_number=delivery.attempt,
            version=__version__,
            plain_header=self._plain_header,
        )
