"""The scenario: accounts with staking vaults on a chain, seeded traffic, and the truth about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from random import Random

from vaultevents.devnet.acts import Act, Funding, log_of
from vaultevents.devnet.blocks import Block, Transaction
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.traffic import WEI_PER_ETH, Traffic
from vaultevents.devnet.truth import Events, Register, Registration, expected, transaction_events

LATE_START_BLOCKS = 8
"""The third vault of each account is registered for blocks from so many after its creation."""

_SILENT_SHARE = 0.25
_CONNECT_DEPOSIT_WEI = WEI_PER_ETH


class World:
    """A chain with vaults whose traffic `step` and `history` mine.

    Each account has `vaults_per_account` vaults, all created and funded in block 1: `acme-1` with a withdrawal queue,
    `acme-2` with another, the rest without. The second account also registers the first account's first vault and
    queue, as `borealis-shared`. `registrations` lists all of this, `acts` what each transaction did, `events` counts
    the events that the registrations have so far, final or not. `events_per_block` is the mean over time.
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
    ) -> None:
        if len(accounts) < 2 or vaults_per_account < 2:
            raise ValueError("the traffic needs two accounts or more with two vaults or more each")
        self.chain = chain if chain is not None else Chain(seed)
        self.events_per_block = events_per_block
        self.missed_slot_share = missed_slot_share
        self.registrations: list[Registration] = []
        self.acts: dict[bytes, tuple[Act, ...]] = {}
        self.events = 0
        self._due = 0.0
        self._rng = Random(f"{seed}/world")  # noqa: S311 (a simulation must repeat)
        self._register = Register(())
        self._vaults: dict[str, list[bytes]] = defaultdict(list)
        self._queues: list[bytes] = []
        self._traffic = Traffic(self._rng, self._vaults, self._queues)
        self._settle(accounts, vaults_per_account)

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

    def expected(self, registrations: Iterable[Registration] | None = None, through: int | None = None) -> Events:
        """The body of every event by (account id, event id), up to block `through` (default: the finalized one)."""
        wanted = self.registrations if registrations is None else registrations
        return expected(self.chain, self.acts, wanted, through)

    def _settle(self, accounts: Sequence[str], vaults_per_account: int) -> None:
        founding = [
            self._new_vault(account, f"{account}-{number}", with_queue=number <= 2, late=number == 3)
            for account in accounts
            for number in range(1, vaults_per_account + 1)
        ]
        shared = self.registrations[0]
        self._watch(shared._replace(account_id=accounts[1], vault_id=f"{accounts[1]}-shared"))
        self._mine(founding)
        self._due = float(self.events)

    def _new_vault(self, account_id: str, vault_id: str, *, with_queue: bool, late: bool = False) -> Transaction:
        address, block = self._rng.randbytes(20), self.chain.head.number + 1
        queue = self._rng.randbytes(20) if with_queue else None
        self._vaults[account_id].append(address)
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
        """Mine transactions until the world has `target` events, to a whole event."""
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
        return self.chain.mine(transactions, missed_slots=missed)

    def _count(self, transaction: Transaction) -> int:
        block = self.chain.head.number + 1
        return len(transaction_events(transaction.hash, self.acts[transaction.hash], block, 0, self._register))
