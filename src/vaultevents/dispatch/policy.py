"""Fairness: how many attempts a webhook and an account may have in flight, and how many begin at once.

Pure: the caller reports attempts and the time, and gets the limits of the next claim. A webhook starts with
`per_webhook` slots. While its attempts are accepted promptly it gets `GROWTH` more for each as many accepted as it has
slots; a failure or a slow answer halves them, at most once for the attempts that were under way together. As slots run
short no webhook has more than `per_webhook`, webhooks that accepted nothing of late have fewer, and an account that has
`SHARE` times what is free gets no more.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from vaultevents.store.deliveries import NO_LIMITS, ClaimRequest, Delivery, Limits, Scarce, Target

GROWTH: Final = 3.0
PROMPT_S: Final = 0.5
SLOW_S: Final = 2.0
USED: Final = 8
"""A limit grows only while at least this part of it is in use."""

SCARCE: Final = 0.25
VERY_SCARCE: Final = 0.9
"""From these shares of slots taken on, webhooks that accepted nothing within `PROVEN_S` may have fewer; all may."""

PROVEN_S: Final = 1.0

SHARE: Final = 8
"""An account may have this many times the free slots: alone 8/9 of them; some stay free however many accounts hog."""

FEW: Final = 16
"""So many attempts in flight, of all webhooks, leave no shortage of slots."""

SHARED_FROM: Final = 32
"""With fewer slots than this none are kept free for other accounts."""


@dataclass(slots=True)
class WebhookLimit:
    """How many attempts of one webhook may be in flight; attempts that began before `halved_at_s` halve it no more."""

    slots: float
    halved_at_s: float = -math.inf

    def accept(self, took_s: float, began_at_s: float, floor: int, most: int) -> None:
        """Count an accepted attempt."""
        if took_s > SLOW_S:
            self.halve(began_at_s, began_at_s + took_s, floor)
        elif took_s <= PROMPT_S:
            self.slots = min(self.slots + GROWTH / self.slots, max(most, floor))

    def halve(self, began_at_s: float, now_s: float, floor: int) -> None:
        """Count an attempt that failed or was slow."""
        if began_at_s >= self.halved_at_s:
            self.slots = max(self.slots / 2, floor)
            self.halved_at_s = now_s


class SlotPolicy:
    """The limits of the next claim, by what is in flight and what was answered. Times are a monotonic clock's."""

    def __init__(self, concurrency: int, per_webhook: int, per_webhook_max: int) -> None:
        self._concurrency = concurrency
        self._per_webhook = per_webhook
        self._most = max(per_webhook, per_webhook_max)
        self._limits: dict[str, WebhookLimit] = {}
        self._of_webhooks: Counter[str] = Counter()
        self._of_accounts: Counter[str] = Counter()
        self._proven: dict[str, float] = {}  # when each webhook last accepted something
        self.in_flight = 0
        self.being_claimed = 0
        """At most this many are being claimed by cycles that are under way."""

        self.last_webhook = ""
        """The webhook that the last claim ended with: the next begins after it."""

    def begin(self, target: Target) -> None:
        """Count an attempt that was claimed."""
        self.in_flight += 1
        self._of_webhooks[target.webhook_id] += 1
        self._of_accounts[target.account_id] += 1

    def end(self, target: Target) -> None:
        """Count an attempt that is settled. A webhook with nothing in flight starts anew."""
        self.in_flight -= 1
        if self._of_webhooks[target.webhook_id] > 1:
            self._of_webhooks[target.webhook_id] -= 1
        else:
            del self._of_webhooks[target.webhook_id]
            self._limits.pop(target.webhook_id, None)
        if self._of_accounts[target.account_id] > 1:
            self._of_accounts[target.account_id] -= 1
        else:
            del self._of_accounts[target.account_id]

    def accepted(self, webhook_id: str, began_at_s: float, now_s: float) -> None:
        """Count an attempt that its receiver accepted."""
        self._proven[webhook_id] = now_s
        limit = self._limits.get(webhook_id)
        used = self._of_webhooks[webhook_id] * USED
        if limit is None:
            if used < self._per_webhook or self._most == self._per_webhook:
                return
            limit = self._limits[webhook_id] = WebhookLimit(self._per_webhook)
        took_s = now_s - began_at_s
        if took_s > PROMPT_S or used >= limit.slots:
            limit.accept(took_s, began_at_s, self._per_webhook, self._most)

    def failed(self, webhook_id: str, began_at_s: float, now_s: float) -> None:
        """Count an attempt that failed."""
        if (limit := self._limits.get(webhook_id)) is not None:
            limit.halve(began_at_s, now_s, self._per_webhook)

    def slots(self, webhook_id: str) -> int:
        """Return how many attempts of a webhook may be in flight while slots are plentiful."""
        limit = self._limits.get(webhook_id)
        return self._per_webhook if limit is None else int(limit.slots)

    def pressed(self, webhook_id: str) -> bool:
        """Return whether a slot is worth freeing at once: more than a few are taken, or half of this webhook's."""
        few = min(FEW, self._concurrency // 2)
        return self.in_flight > few or 2 * self._of_webhooks[webhook_id] >= self._per_webhook

    def request(self, ending: int, most: int, now_s: float, lease: UUID, lease_s: float) -> ClaimRequest:
        """Return the next claim, of `most` deliveries at most, while `ending` attempts are settled with it."""
        return ClaimRequest(
            min(self.room(ending), most),
            lease,
            lease_s,
            self._per_webhook,
            self.last_webhook,
            self.scarce(ending, now_s),
            self.limits(ending),
            self._free(ending),
        )

    def room(self, ending: int) -> int:
        """Return how many to claim at most while `ending` attempts are settled.

        With many slots never more than half of those that are free, so that one claim gives no account all of them.
        """
        free = self._free(ending)
        return (free + 1) // 2 if self._concurrency >= SHARED_FROM else free

    def _free(self, ending: int) -> int:
        return max(self._concurrency - self.in_flight - self.being_claimed + ending, 0)

    def scarce(self, ending: int, now_s: float) -> Scarce | None:
        """Return the limits of unproven webhooks, or None while slots are plentiful.

        As slots run short those webhooks have fewer, so that those that hang never have all. Webhooks that have
        accepted something of late keep theirs until nearly all slots are taken.
        """
        taken = self._taken(ending)
        if taken <= SCARCE:
            return None
        self._proven = {webhook_id: at_s for webhook_id, at_s in self._proven.items() if at_s > now_s - PROVEN_S}
        few = max(math.ceil(self._per_webhook * (1 - taken)), 1)
        return Scarce(few, tuple(self._proven) if taken < VERY_SCARCE else ())

    def limits(self, ending: int) -> Limits:
        """Return the slots of the webhooks that have more than `per_webhook`, and the accounts that get no more."""
        taken = self._taken(ending)
        if taken <= SCARCE:
            grown = {
                webhook_id: slots
                for webhook_id in self._limits
                if (slots := self.slots(webhook_id)) > self._per_webhook
            }
            return Limits(grown) if grown else NO_LIMITS
        if self._concurrency < SHARED_FROM:
            return NO_LIMITS
        most = SHARE * max(self._concurrency - self.in_flight + ending, 0)
        closed = [account_id for account_id, number in self._of_accounts.items() if number >= most]
        return Limits(closed_accounts=closed) if closed else NO_LIMITS

    def _taken(self, ending: int) -> float:
        return (self.in_flight - ending) / self._concurrency


class Bursts:
    """What was claimed and has not begun: begun in bursts of `size`, the next when the last is answered or overdue.

    Accounts take turns, so that the deliveries of one wait for no more than one of each other account.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._claimed = OrderedDict[str, deque[Delivery]]()
        self._pausing = False
        self.number = 0
        """The present burst."""

        self.posting = 0
        """The attempts of the present burst that have no answer yet."""

        self.waiting = 0
        """How many were claimed and have not begun."""

    def extend(self, deliveries: Iterable[Delivery]) -> None:
        """Add what was claimed."""
        for delivery in deliveries:
            self._claimed.setdefault(delivery.target.account_id, deque()).append(delivery)
            self.waiting += 1

    def next(self) -> Delivery | None:
        """Return the delivery to begin now, or None while this burst is full."""
        if not self.waiting or self.posting >= self._size:
            return None
        self.posting += 1
        self.waiting -= 1
        account_id, claimed = next(iter(self._claimed.items()))
        delivery = claimed.popleft()
        if claimed:
            self._claimed.move_to_end(account_id)
        else:
            del self._claimed[account_id]
        return delivery

    def end(self, burst: int) -> bool:
        """Count an answer to an attempt of a burst; return whether another may begin in its place."""
        if burst != self.number:
            return False
        self.posting -= 1
        return True

    def should_pause(self) -> bool:
        """Return whether a pause before the next burst has to begin; it lasts until `advance`."""
        begins = self.waiting > 0 and not self._pausing
        self._pausing = self._pausing or begins
        return begins

    def advance(self) -> None:
        """Begin the next burst, however many attempts of the present one have no answer yet."""
        self.number += 1
        self.posting = 0
        self._pausing = False

    def clear(self) -> None:
        """Forget what has not begun."""
        self._claimed.clear()
        self.waiting = 0
