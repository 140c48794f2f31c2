"""The six events: payloads, ids and bodies, as `docs/events.md` shows them (rules E1 to E16).

A body is a pure function of chain data and the registry. It is encoded once, when the event is committed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from vaultevents.core.registry import Owner, Registry, Role
from vaultevents.core.units import Address, Epoch, Hash32, Pubkey, ValidatorIndex, Wei, checksum, eth_text, hex_text

ENCODING = 1
"""Version of titles, messages, key order and encoding; kept in each event row (rule E16)."""

SEVERITY = "info"
TEST_TYPE = "webhook_test"


@dataclass(frozen=True, slots=True)
class FundingReceived:
    """All `EtherFunded` logs of one vault in one transaction (rule E3).

    `position` counts the vault among the distinct emitters in that transaction, from 1.
    """

    event_type: ClassVar[str] = "funding_received"
    role: ClassVar[Role] = Role.VAULT
    tx_hash: Hash32
    amount_wei: Wei
    vault: Address
    position: int

    def id_suffix(self, vault_id: str) -> str:
        ordinal = f"_{self.position}" if self.position > 1 else ""
        return hex_text(self.tx_hash).upper() + ordinal

    def data(self) -> dict[str, Any]:
        return {
            "tx_hash": hex_text(self.tx_hash),
            "amount_wei": str(self.amount_wei),
            "staking_vault_address": checksum(self.vault),
        }

    def title_and_message(self, vault_id: str) -> tuple[str, str]:
        return "Funding received", f"Vault {vault_id} received {eth_text(self.amount_wei)} ETH."


@dataclass(frozen=True, slots=True)
class _OfValidator:
    """What the three events of a validator share."""

    role: ClassVar[Role] = Role.VAULT
    validator_index: ValidatorIndex
    validator_pubkey: Pubkey
    epoch: Epoch

    def id_suffix(self, vault_id: str) -> str:
        return str(self.validator_index)

    def data(self) -> dict[str, Any]:
        return {
            "validator_index": self.validator_index,
            "validator_pubkey": hex_text(self.validator_pubkey),
            "epoch": self.epoch,
        }


@dataclass(frozen=True, slots=True)
class ValidatorActivated(_OfValidator):
    """A validator's `activation_epoch` is reached."""

    event_type: ClassVar[str] = "validator_activated"

    def title_and_message(self, vault_id: str) -> tuple[str, str]:
        text = f"Validator {self.validator_index} of vault {vault_id} became active in epoch {self.epoch}."
        return "Validator activated", text


@dataclass(frozen=True, slots=True)
class ValidatorExited(_OfValidator):
    """A validator's `exit_epoch` is reached."""

    event_type: ClassVar[str] = "validator_exited"

    def title_and_message(self, vault_id: str) -> tuple[str, str]:
        text = f"Validator {self.validator_index} of vault {vault_id} exited in epoch {self.epoch}."
        return "Validator exited", text


@dataclass(frozen=True, slots=True)
class ValidatorWithdrawalCompleted(_OfValidator):
    """All withdrawals of one validator in one epoch (rule E4)."""

    event_type: ClassVar[str] = "validator_withdrawal_completed"
    amount_wei: Wei

    def id_suffix(self, vault_id: str) -> str:
        return f"{self.validator_index}_{self.epoch}"

    def data(self) -> dict[str, Any]:
        return {**_OfValidator.data(self), "amount_eth": eth_text(self.amount_wei)}

    def title_and_message(self, vault_id: str) -> tuple[str, str]:
        amount = eth_text(self.amount_wei)
        text = f"{amount} ETH moved from validator {self.validator_index} to vault {vault_id} in epoch {self.epoch}."
        return "Validator withdrawal completed", text


@dataclass(frozen=True, slots=True)
class WithdrawalClaimed:
    """A `WithdrawalClaimed` log of a vault's withdrawal queue."""

    event_type: ClassVar[str] = "withdrawal_claimed"
    role: ClassVar[Role] = Role.QUEUE
    tx_hash: Hash32
    request_id: int
    recipient: Address
    owner: Address
    amount_wei: Wei
    queue: Address

    def id_suffix(self, vault_id: str) -> str:
        return f"{checksum(self.queue)}_{self.request_id}"

    def data(self) -> dict[str, Any]:
        return {
            "tx_hash": hex_text(self.tx_hash),
            "request_id": str(self.request_id),
            "recipient": checksum(self.recipient),
            "owner": checksum(self.owner),
            "amount_eth": eth_text(self.amount_wei),
            "withdrawal_queue_address": checksum(self.queue),
        }

    def title_and_message(self, vault_id: str) -> tuple[str, str]:
        amount = eth_text(self.amount_wei)
        return "Withdrawal claimed", f"Withdrawal request {self.request_id} of vault {vault_id} paid {amount} ETH."


@dataclass(frozen=True, slots=True)
class ReportUpdateAvailable:
    """A published oracle report contains the vault; `calldata` applies it (rules C6 and E13)."""

    event_type: ClassVar[str] = "report_update_available"
    role: ClassVar[Role] = Role.VAULT
    calldata: bytes
    report_timestamp: int

    def id_suffix(self, vault_id: str) -> str:
        return f"{vault_id}_{self.report_timestamp}"

    def data(self) -> dict[str, Any]:
        return {"calldata": hex_text(self.calldata), "report_timestamp": str(self.report_timestamp)}

    def title_and_message(self, vault_id: str) -> tuple[str, str]:
        text = f"An oracle report with timestamp {self.report_timestamp} was published for vault {vault_id}."
        return "Report update available", text


Payload = (
    FundingReceived
    | ValidatorActivated
    | ValidatorExited
    | ValidatorWithdrawalCompleted
    | WithdrawalClaimed
    | ReportUpdateAvailable
)

PAYLOADS: tuple[type[Payload], ...] = (
    FundingReceived,
    ValidatorActivated,
    ValidatorExited,
    ValidatorWithdrawalCompleted,
    WithdrawalClaimed,
    ReportUpdateAvailable,
)
EVENT_TYPES = tuple(payload.event_type for payload in PAYLOADS)

_ID = re.compile(rf"({'|'.join(EVENT_TYPES)})_([A-Za-z0-9-]{{1,64}})_.+", re.DOTALL)


def type_and_account(event_id: str) -> tuple[str, str] | None:
    """Return the event type and the account that an event id names; None for a text of another form.

    Account ids have no `_` (rule E9), so an id can be read in one way only.
    """
    parts = _ID.fullmatch(event_id)
    return None if parts is None else (parts[1], parts[2])


def funding_ids(account_id: str, tx_hash: Hash32, positions: int) -> list[str]:
    """Return the ids that fundings of a transaction have in an account, for the first `positions` emitters in it."""
    of_first = f"{FundingReceived.event_type}_{account_id}_{hex_text(tx_hash).upper()}"
    return [of_first, *(f"{of_first}_{position}" for position in range(2, positions + 1))]


@dataclass(frozen=True, slots=True)
class Observation:
    """Something seen on the chain that is not yet anyone's.

    `address` is the vault, for a claim its queue; `block` and `at_ms` are those of the moment in rule E2. Without a
    `block` (the start of an epoch) the time alone decides in which span of a vault it lies (rule E12).
    """

    address: Address
    block: int | None
    at_ms: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Event:
    """An observation and the vault whose event it is.

    `id` is `<event_type>_<account_ref_id>_<suffix>`: the deduplication key. `body` is what is posted,
    in the newest encoding.
    """

    owner: Owner
    observation: Observation
    id: str = field(init=False)
    body: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        suffix = self.observation.payload.id_suffix(self.owner.vault_id)
        object.__setattr__(self, "id", f"{self.event_type}_{self.owner.account_id}_{suffix}")
        object.__setattr__(self, "body", encode(self))

    @property
    def event_type(self) -> str:
        return self.observation.payload.event_type

    @property
    def key(self) -> tuple[str, str]:
        """By which it is stored once: account and id."""
        return self.owner.account_id, self.id

    def body_in(self, encoding: int) -> bytes:
        """The body as a row of that encoding has it (rule E16)."""
        return self.body if encoding == ENCODING else encode(self, encoding)


def project(observation: Observation, registry: Registry) -> list[Event]:
    """The events of one observation: one for each registered vault that covers its moment (rules E12 and C7)."""
    owners = registry.owners(observation.payload.role, observation.address, observation.block, observation.at_ms)
    return [Event(owner, observation) for owner in owners]


def encode(event: Event, encoding: int = ENCODING) -> bytes:
    """Encode the body: compact UTF-8 JSON, keys in the order of `docs/events.md` (rules E11 and E16)."""
    if encoding != 1:
        raise ValueError(f"encoding {encoding} is not known to this version")
    observation, owner = event.observation, event.owner
    words = observation.payload.title_and_message(owner.vault_id)
    return _envelope(event.id, owner, event.event_type, words, observation.payload.data(), observation.at_ms)


def encode_test(account_id: str, vault_id: str, webhook_id: str, random: str, at_ms: int) -> tuple[str, bytes]:
    """Id and body of what `test` sends: an envelope like an event's, of a type that no receiver books (rule A19)."""
    test_id = f"{TEST_TYPE}_{account_id}_{random}"
    words = "Webhook test", f"This tests the webhook {webhook_id}. Nothing happened on the chain."
    return test_id, _envelope(test_id, Owner(account_id, vault_id), TEST_TYPE, words, {"webhook_id": webhook_id}, at_ms)


def _envelope(
    envelope_id: str, owner: Owner, event_type: str, words: tuple[str, str], payload: dict[str, Any], at_ms: int
) -> bytes:
    title, message = words
    return msgspec.json.encode(
        {
            "id": envelope_id,
            "account_ref_id": owner.account_id,
            "staking_vault_id": owner.vault_id,
            "event_type": event_type,
            "severity": SEVERITY,
            "title": title,
            "message": message,
            "payload": payload,
            "created_at": at_ms,
        }
    )
