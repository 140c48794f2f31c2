"""The events that a right service sends for contracts, written from what these did and not from logs.

Ids and bodies follow `docs/events.md` and the rules E2, E3, E5 to E8 and E11 to E13.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Context, Decimal
from typing import Any, NamedTuple

from eth_utils.address import to_checksum_address

from vaultevents.devnet.acts import Act, Claim, Funding, Malformed, Publication
from vaultevents.devnet.chain import Chain

Events = dict[tuple[str, str], bytes]
"""Body by (account id, event id)."""

_EXACT = Context(prec=100)


class Registration(NamedTuple):
    """A vault of an account, for blocks `first_block`..`last_block` (open while that is None)."""

    account_id: str
    vault_id: str
    address: bytes
    queue: bytes | None
    first_block: int
    last_block: int | None = None

    def covers(self, block: int) -> bool:
        return self.first_block <= block and (self.last_block is None or block <= self.last_block)


class Register:
    """Registrations by the address that they watch."""

    def __init__(self, registrations: Iterable[Registration]) -> None:
        self._of_vault: dict[bytes, list[Registration]] = defaultdict(list)
        self._of_queue: dict[bytes, list[Registration]] = defaultdict(list)
        for registration in registrations:
            self.add(registration)

    def add(self, registration: Registration) -> None:
        self._of_vault[registration.address].append(registration)
        if registration.queue is not None:
            self._of_queue[registration.queue].append(registration)

    def of_vault(self, address: bytes, block: int) -> list[Registration]:
        return [registration for registration in self._of_vault.get(address, ()) if registration.covers(block)]

    def of_queue(self, queue: bytes, block: int) -> list[Registration]:
        return [registration for registration in self._of_queue.get(queue, ()) if registration.covers(block)]


def expected(
    chain: Chain,
    acts: Mapping[bytes, Sequence[Act]],
    registrations: Iterable[Registration | tuple[str, str, bytes, bytes | None, int, int | None]],
    through: int | None = None,
) -> Events:
    """Every event of the canonical blocks up to `through` (default: the finalized block).

    `acts` are those of each transaction by its hash. Without a finalized block there are no events.
    """
    register = Register(Registration(*fields) for fields in registrations)
    last = chain.finalized_number if through is None else through
    events: Events = {}
    for number in range(0 if last is None else last + 1):
        block = chain.block(number)
        if block is None:
            break
        for transaction in block.transactions:
            done = acts.get(transaction.hash, ())
            events.update(transaction_events(transaction.hash, done, number, block.timestamp_s, register))
    return events


def transaction_events(tx_hash: bytes, acts: Sequence[Act], block: int, timestamp_s: int, register: Register) -> Events:
    """The events of one transaction in a block."""
    fields = [
        *_fundings(tx_hash, acts, block, register),
        *_claims(tx_hash, acts, block, register),
        *_reports(acts, block, register),
    ]
    return dict(event(*values, created_at_ms=timestamp_s * 1000) for values in fields)


def event(
    owner: Registration,
    event_type: str,
    suffix: str,
    title: str,
    message: str,
    payload: dict[str, Any],
    *,
    created_at_ms: int,
) -> tuple[tuple[str, str], bytes]:
    """One entry of `Events`: keys and order of the envelope as in `docs/events.md`."""
    event_id = f"{event_type}_{owner.account_id}_{suffix}"
    envelope = {
        "id": event_id,
        "account_ref_id": owner.account_id,
        "staking_vault_id": owner.vault_id,
        "event_type": event_type,
        "severity": "info",
        "title": title,
        "message": message,
        "payload": payload,
        "created_at": created_at_ms,
    }
    body = json.dumps(envelope, separators=(",", ":"), ensure_ascii=False).encode()
    return (owner.account_id, event_id), body


_Fields = tuple[Registration, str, str, str, str, dict[str, Any]]


def _fundings(tx_hash: bytes, acts: Sequence[Act], block: int, register: Register) -> Iterator[_Fields]:
    totals: dict[bytes, int] = {}
    for act in acts:
        match act:
            case Funding(vault, amount_wei):
                totals[vault] = totals.get(vault, 0) + amount_wei
            case Malformed(emitter):
                totals.setdefault(emitter, 0)
    hash_text = "0x" + tx_hash.hex()
    for place, (vault, total) in enumerate(totals.items(), start=1):
        suffix = hash_text.upper() if place == 1 else f"{hash_text.upper()}_{place}"
        payload = {
            "tx_hash": hash_text,
            "amount_wei": str(total),
            "staking_vault_address": to_checksum_address(vault),
        }
        for owner in register.of_vault(vault, block):
            message = f"Vault {owner.vault_id} received {eth(total)} ETH."
            yield owner, "funding_received", suffix, "Funding received", message, payload


def _claims(tx_hash: bytes, acts: Sequence[Act], block: int, register: Register) -> Iterator[_Fields]:
    for act in acts:
        if not isinstance(act, Claim):
            continue
        queue = to_checksum_address(act.queue)
        payload = {
            "tx_hash": "0x" + tx_hash.hex(),
            "request_id": str(act.request_id),
            "recipient": to_checksum_address(act.recipient),
            "owner": to_checksum_address(act.owner),
            "amount_eth": eth(act.amount_wei),
            "withdrawal_queue_address": queue,
        }
        for owner in register.of_queue(act.queue, block):
            message = f"Withdrawal request {act.request_id} of vault {owner.vault_id} paid {eth(act.amount_wei)} ETH."
            yield owner, "withdrawal_claimed", f"{queue}_{act.request_id}", "Withdrawal claimed", message, payload


def _reports(acts: Sequence[Act], block: int, register: Register) -> Iterator[_Fields]:
    for act in acts:
        if not isinstance(act, Publication):
            continue
        for vault, calldata in act.calldata:
            payload = {"calldata": "0x" + calldata.hex(), "report_timestamp": str(act.timestamp_s)}
            for owner in register.of_vault(vault, block):
                suffix = f"{owner.vault_id}_{act.timestamp_s}"
                message = f"An oracle report with timestamp {act.timestamp_s} was published for vault {owner.vault_id}."
                yield owner, "report_update_available", suffix, "Report update available", message, payload


def eth(wei: int) -> str:
    """Exact decimal ETH without exponent or trailing zeros (rule E7)."""
    return f"{Decimal(wei).scaleb(-18, _EXACT).normalize(_EXACT):f}"
