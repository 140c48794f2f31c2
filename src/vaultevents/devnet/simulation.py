"""The scenario: accounts with staking vaults on a chain, seeded traffic, and the truth about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from random import Random

from vaultevents.devnet.acts import Act, Funding, log_of
from vaultevents.devnet.beacon import Beacon
from vaultevents.devnet.beacontruth import expected_of_validators
from vaultevents.devnet.blocks import Block, Transaction
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.deposits import deposit_log
from vaultevents.devnet.oracle import Oracle
from vaultevents.devnet.staking import Staking
from vaultevents.devnet.traffic import WEI_PER_ETH, Traffic
from vaultevents.devnet.truth import Events, Register, Registration, expected, transaction_events

LATE_START_BLOCKS = 8
"""The third vault of each account is registered for blocks from so many after its creation."""

_FIRST_DEPOSIT_NONCE = 3 * 2**30
"""Beyond those of other transactions, whose hashes do not depend on deposits."""
_SILENT_SHARE = 0.25
_CONNECT_DEPOSIT_WEI = WEI_PER_ETH


class Simulation:
    """A chain with vaults whose traffic `step` and `history` mine.

    Each account has `vaults_per_account` vaults, all created and funded in block 1: `acme-1` with a withdrawal queue,
    `acme-2` with another, the rest without. The second account also registers the first account's first vault and
    queue, as `borealis-shared`. `registrations` lists all of this, `acts` what each transaction did, `events` counts
    the events of contracts that the registrations have so far, final or not; `events_per_block` is their mean.

    With `validators` in its genesis state (11 or more) it also has their lives and withdrawals, of which at most
    `withdrawals_per_block` are ordinary ones; what the contracts of vaults do stays the same. The deposit contract logs
    each of these validators, those of genesis in block 1. `beacon` is there in any case.

    With `report_every` (2 or more) every so many blocks the contract `lazy_oracle` also publishes a report about the
    vaults; its events come on top of `events`. `report_files` has the files of all reports by CID, also those to come.
    """

    def __init__(
        self,
        seed: int,
        *,
        chain: Chain | None = None,
        accounts: Sequence[str] = ("acme", "borealis"),
        vaults_per_account: int = 3,
        events_per_block: float = 1.0,
        missed_slot_share: float = 0.03,
        validators: int = 0,
        slots_per_epoch: int = 8,
        withdrawals_per_block: int = 3,
        report_every: int | None = None,
    ) -> None:
        if len(accounts) < 2 or vaults_per_account < 2:
            raise ValueError("the traffic needs two accounts or more with two vaults or more each")
        self.chain = chain if chain is not None else Chain(seed)
        self.beacon = Beacon(self.chain, slots_per_epoch=slots_per_epoch)
        self.events_per_block = events_per_block
        self.missed_slot_share = missed_slot_share
        self.registrations: list[Registration] = []
        self.acts: dict[bytes, tuple[Act, ...]] = {}
        self.events = 0
        self._due = 0.0
        self._deposited = 0
        self._rng = Random(f"{seed}/world")  # noqa: S311 (a simulation must repeat)
        self._register = Register(())
        self._vaults: dict[str, list[bytes]] = defaultdict(list)
        self._addresses: list[bytes] = []
        self._queues: list[bytes] = []
        self._traffic = Traffic(self._rng, self._vaults, self._queues)
        self._staking: Staking | None = None
        oracle_rng = Random(f"{seed}/oracle")  # noqa: S311 (a simulation must repeat)
        self._oracle = Oracle(oracle_rng, self.chain, self._addresses, report_every)
        founding = self._found(accounts, vaults_per_account)
        if report_every is not None:
            founding.append(self._transaction([], [self.lazy_oracle]))
        if validators:
            rng = Random(f"{seed}/staking")  # noqa: S311 (a simulation must repeat)
            self._staking = Staking(rng, self.beacon, self._addresses, validators, withdrawals_per_block)
        self._mine(founding)
        self._due = float(self.events)

    @property
    def lazy_oracle(self) -> bytes:
        """The address of the contract that publishes reports; nothing is there without `report_every`."""
        return self._oracle.lazy_oracle

    @property
    def report_files(self) -> Mapping[str, bytes]:
        return self._oracle.files

    def add_vault(self, account_id: str, vault_id: str, *, with_queue: bool = True) -> Registration:
        """Create a vault, and fund it, in a block of its own; from then on traffic uses it."""
        self._mine([self._new_vault(account_id, vault_id, with_queue=with_queue)])
        return self.registrations[-1]

    def step(self) -> Block:
        """Mine the next block; a quarter of the blocks are silent, the others make up for them."""
        self._due += self.events_per_block
        return self._next_block(self._due, silent=self._rng.random() < _SILENT_SHARE)

    def history(self, blocks: int, events: int | None = None) -> None:
        """Mine many blocks, with `events` events in all (a few more, where the last transaction has several)."""
        rate, before = self.events_per_block if events is None else events / blocks, self.events
        for done in range(1, blocks + 1):
            silent = done < blocks and self._rng.random() < _SILENT_SHARE
            self._next_block(before + rate * done, silent=silent)
        self._due = float(self.events)

    def expected(
        self,
        registrations: Iterable[Registration] | None = None,
        through: int | None = None,
        event_types: Collection[str] | None = None,
        now_s: float | None = None,
    ) -> Events:
        """The body of every event by (account id, event id) that is due at `now_s` when block `through` is final.

        The default is the time of the chain's head, its finalized block, and events of all types.
        """
        wanted = self.registrations if registrations is None else list(registrations)
        contracts = expected(self.chain, self.acts, wanted, through)
        events = {**contracts, **expected_of_validators(self.beacon, wanted, through, now_s)}
        if event_types is None:
            return events
        prefixes = tuple(f"{event_type}_" for event_type in event_types)
        return {key: body for key, body in events.items() if key[1].startswith(prefixes)}

    def _found(self, accounts: Sequence[str], vaults_per_account: int) -> list[Transaction]:
        founding = [
            self._new_vault(account, f"{account}-{number}", with_queue=number <= 2, late=number == 3)
            for account in accounts
            for number in range(1, vaults_per_account + 1)
        ]
        shared = self.registrations[0]
        self._watch(shared._replace(account_id=accounts[1], vault_id=f"{accounts[1]}-shared"))
        return founding

    def _new_vault(self, account_id: str, vault_id: str, *, with_queue: bool, late: bool = False) -> Transaction:
        address, block = self._rng.randbytes(20), self.chain.head.number + 1
        queue = self._rng.randbytes(20) if with_queue else None
        self._vaults[account_id].append(address)
        self._addresses.append(address)
        if queue is not None:
            self._queues.append(queue)
        first_block = block + LATE_START_BLOCKS if late else block
        self._watch(Registration(account_id, vault_id, address, queue, first_block))
        creates = (address,) if queue is None else (address, queue)
        return self._transaction([Funding(address, _CONNECT_DEPOSIT_WEI)], creates)

    def _watch(self, registration: Registration) -> None:
        self.registrations.append(registration)
        self._register.add(registration)

    def _transaction(self, acts: Iterable[Act], creates: Iterable[bytes] = ()) -> Transaction:
        acts = tuple(acts)
        transaction = self.chain.transaction(map(log_of, acts), creates)
        self.acts[transaction.hash] = acts
        return transaction

    def _next_block(self, target: float, *, silent: bool) -> Block:
        """Mine transactions until the simulation has `target` events, to a whole event."""
        transactions: list[Transaction] = []
        ahead = 0
        while not silent and self.events + ahead < round(target):
            transaction = self._transaction(self._traffic.deal())
            ahead += self._count(transaction)
            transactions.append(transaction)
        return self._mine(transactions)

    def _mine(self, transactions: Sequence[Transaction]) -> Block:
        missed = self._rng.randint(1, 3) if self._rng.random() < self.missed_slot_share else 0
        self.events += sum(map(self._count, transactions))
        transactions = [
            *transactions,
            *(self._transaction([publication]) for publication in self._oracle.publications()),
        ]
        if self._staking is None:
            return self.chain.mine(transactions, missed_slots=missed)
        slot = self.chain.head.slot + 1
        while self._staking.is_missed(slot + missed):
            missed += 1
        payouts = self._staking.payouts(slot + missed)
        return self.chain.mine([*transactions, *self._deposits()], missed_slots=missed, payouts=payouts)

    def _deposits(self) -> list[Transaction]:
        """The deposits of the validators that were appended since the last block, in one transaction."""
        first, validators = self._deposited, self.beacon.registry.validators
        self._deposited = len(validators)
        logs = [deposit_log(validator) for validator in validators[first:]]
        return [self.chain.transaction(logs, nonce=_FIRST_DEPOSIT_NONCE + first)] if logs else []

    def _count(self, transaction: Transaction) -> int:
        block = self.chain.head.number + 1
        return len(transaction_events(transaction.hash, self.acts[transaction.hash], block, 0, self._register))
