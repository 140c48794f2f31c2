"""Who watches what: accounts, their vaults, and the spans of blocks they are registered for (rules E9 and E12)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from vaultevents.core.errors import InputError
from vaultevents.core.spans import Span
from vaultevents.core.units import Address

_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


def check_id(text: str, what: str) -> str:
    """An account or vault id: 1 to 64 letters, digits and hyphens (rule E9); raises `InputError`."""
    if not _ID.fullmatch(text):
        raise InputError(
            f"'{text}' cannot be {what}: use 1 to 64 letters, digits and hyphens "
            "('_' joins the parts of event ids and '.' those of the signed content, so neither can be allowed)"
        )
    return text


class Role(StrEnum):
    """As what an address is registered."""

    VAULT = "vault"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True)
class VaultSpan:
    """One registration: events of blocks `first`..`last` exist (open while `last` is None).

    Those of blocks before `deliver_from` are stored, not delivered (rule D13, `--no-deliver`). The times are those of
    the first block, the last, and the one before `deliver_from`, as far as they are known yet; without them nothing
    that has only a time is covered.
    """

    first: int
    last: int | None = None
    deliver_from: int = 0
    first_time_s: int | None = None
    last_time_s: int | None = None
    quiet_time_s: int | None = None

    def covers(self, block: int | None, at_ms: int) -> bool:
        """Whether a moment lies in this span: by its block, or where it has none by the times of the span's ends."""
        if block is not None:
            return self.first <= block and (self.last is None or block <= self.last)
        if self.first_time_s is None or at_ms < self.first_time_s * 1000:
            return False
        return self.last is None or (self.last_time_s is not None and at_ms <= self.last_time_s * 1000)

    def is_quiet(self, block: int | None, at_ms: int) -> bool:
        """Whether what happened at that moment is sent to nobody."""
        if block is not None or self.deliver_from == 0:
            return block is not None and block < self.deliver_from
        return self.quiet_time_s is None or at_ms <= self.quiet_time_s * 1000

    def blocks_without_time(self) -> set[int]:
        """The blocks whose times are still to be found out."""
        ends = [(self.first, self.first_time_s)]
        if self.last is not None and self.last >= self.first:
            ends.append((self.last, self.last_time_s))
        if self.deliver_from > 0:
            ends.append((self.deliver_from - 1, self.quiet_time_s))
        return {block for block, time_s in ends if time_s is None}

    def overlaps(self, span: Span) -> bool:
        return self.first <= span.last and (self.last is None or span.first <= self.last)


@dataclass(frozen=True, slots=True)
class Vault:
    """A staking vault of one account, with its withdrawal queue where there is one."""

    account_id: str
    id: str
    address: Address
    queue: Address | None
    spans: tuple[VaultSpan, ...]


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """Whose event it is; `suppressed` events are stored and sent to nobody."""

    account_id: str
    vault_id: str
    suppressed: bool = False


@dataclass(frozen=True, slots=True)
class Watched:
    """Addresses whose logs matter in some span: vaults and queues of accounts, oracles of the protocol.

    `depositees`: vaults whose deposits to the beacon chain matter, as `deposit_contracts` log them.
    """

    vaults: frozenset[Address] = frozenset()
    queues: frozenset[Address] = frozenset()
    oracles: frozenset[Address] = frozenset()
    depositees: frozenset[Address] = frozenset()
    deposit_contracts: frozenset[Address] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.vaults or self.queues or self.oracles or self.depositees)


class Registry:
    """An immutable snapshot; `version` is another one after each change of what is registered (rule C9)."""

    __slots__ = ("_by_address", "vaults", "version")

    def __init__(self, version: int, vaults: Iterable[Vault]) -> None:
        self.version = version
        self.vaults = tuple(vaults)
        index: dict[tuple[Role, Address], list[Vault]] = defaultdict(list)
        for vault in self.vaults:
            index[Role.VAULT, vault.address].append(vault)
            if vault.queue is not None:
                index[Role.QUEUE, vault.queue].append(vault)
        self._by_address: Mapping[tuple[Role, Address], list[Vault]] = dict(index)

    def owners(self, role: Role, address: Address, block: int | None, at_ms: int) -> list[Owner]:
        """Each vault for which something at `address` at that moment is an event; every one once, sorted."""
        found = []
        for vault in self._by_address.get((role, address), ()):
            spans = [span for span in vault.spans if span.covers(block, at_ms)]
            if spans:
                found.append(Owner(vault.account_id, vault.id, all(span.is_quiet(block, at_ms) for span in spans)))
        return sorted(found)

    def registered_at(self, block: int) -> list[Owner]:
        """Return each vault that is registered for a block, sorted."""
        return sorted(
            Owner(vault.account_id, vault.id)
            for vault in self.vaults
            if any(span.covers(block, 0) for span in vault.spans)
        )

    def watched(self, span: Span) -> Watched:
        """The addresses that somebody has registered for a block of `span`."""
        live = [vault for vault in self.vaults if any(own.overlaps(span) for own in vault.spans)]
        return Watched(
            frozenset(vault.address for vault in live),
            frozenset(vault.queue for vault in live if vault.queue is not None),
        )

    def vault_addresses(self) -> frozenset[Address]:
        """Every vault address that is or was registered."""
        return frozenset(vault.address for vault in self.vaults)

    def blocks_without_time(self) -> set[int]:
        """The ends of spans whose times are still to be found out."""
        return {block for vault in self.vaults for span in vault.spans for block in span.blocks_without_time()}
