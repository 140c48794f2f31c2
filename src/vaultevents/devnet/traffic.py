"""Seeded transactions: every awkward thing that contracts do in one transaction, dealt like cards from a deck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random

from vaultevents.devnet.acts import Act, Claim, Funding, Malformed

WEI_PER_ETH = 10**18


class Traffic:
    """Deals the acts of one transaction after another.

    `vaults` are each account's vault addresses (two accounts or more, two vaults each or more), `queues` the watched
    withdrawal queues (one or more). A deck holds each kind of transaction, plain ones several times; it is shuffled
    and dealt to its end before the next, so `DECK_SIZE` transactions contain every kind.
    """

    def __init__(self, rng: Random, vaults: Mapping[str, Sequence[bytes]], queues: Sequence[bytes]) -> None:
        self._rng = rng
        self._vaults = vaults
        self._queues = queues
        self._core_queue = rng.randbytes(20)
        self._foreign = [rng.randbytes(20) for _ in range(4)]
        self._people = [rng.randbytes(20) for _ in range(12)]
        self._claimed: Counter[bytes] = Counter()
        self._deck: list[Callable[[Traffic], list[Act]]] = []

    def deal(self) -> list[Act]:
        """The acts of the next transaction, in log order."""
        if not self._deck:
            self._deck = [kind for kind, copies in _DECK.items() for _ in range(copies)]
            self._rng.shuffle(self._deck)
        return self._deck.pop()(self)

    def one_funding(self) -> list[Act]:
        return [self._funding(self._any_vault())]

    def same_vault_twice(self) -> list[Act]:
        vault = self._any_vault()
        # Halved, so that the sum is still a uint256.
        return [Funding(vault, max(self._amount_wei() >> 1, 1)) for _ in range(2)]

    def two_vaults_of_one_account(self) -> list[Act]:
        first, second = self._rng.sample(self._vaults[self._any_account()], 2)
        return [self._funding(first), self._funding(second)]

    def two_accounts(self) -> list[Act]:
        return [self._funding(vault) for vault in self._vault_of_two_accounts()]

    def three_fundings(self) -> list[Act]:
        """A, B, C or A, B, A of two accounts."""
        first, second = self._vault_of_two_accounts()
        third = self._rng.choice([first, self._any_vault()])
        return [Funding(vault, max(self._amount_wei() >> 2, 1)) for vault in (first, second, third)]

    def foreign_emitter_first(self) -> list[Act]:
        return [self._funding(self._any_foreign()), self._funding(self._any_vault())]

    def malformed_emitter_first(self) -> list[Act]:
        """X, A, B, A where X has another layout: it is nobody's event, but it counts as an emitter."""
        first, second = self._vault_of_two_accounts()
        parts = [Funding(vault, max(self._amount_wei() >> 1, 1)) for vault in (first, second, first)]
        return [Malformed(self._any_foreign()), *parts]

    def one_claim(self) -> list[Act]:
        owner = self._rng.choice(self._people)
        return [self._claim(self._any_queue(), owner, owner, self._amount_wei())]

    def claim_to_another(self) -> list[Act]:
        owner, recipient = self._rng.sample(self._people, 2)
        return [self._claim(self._any_queue(), owner, recipient, self._amount_wei())]

    def batch_claim(self) -> list[Act]:
        queue, (owner, recipient) = self._any_queue(), self._rng.sample(self._people, 2)
        count = self._rng.randint(2, 4)
        return [self._claim(queue, owner, recipient, self._amount_wei()) for _ in range(count)]

    def claim_of_nothing(self) -> list[Act]:
        owner = self._rng.choice(self._people)
        return [self._claim(self._any_queue(), owner, owner, 0)]

    def claim_and_funding(self) -> list[Act]:
        return [*self.one_claim(), *self.one_funding()]

    def foreign_contract(self) -> list[Act]:
        emitter, person = self._any_foreign(), self._rng.choice(self._people)
        return [self._funding(emitter), Malformed(emitter), self._claim(emitter, person, person, self._amount_wei())]

    def core_queue(self) -> list[Act]:
        owner, recipient = self._rng.sample(self._people, 2)
        return [self._claim(self._core_queue, owner, recipient, self._amount_wei())]

    def reverted(self) -> list[Act]:
        """A call that reverted inside: included, but without logs."""
        return []

    def _funding(self, vault: bytes) -> Funding:
        return Funding(vault, self._amount_wei())

    def _claim(self, queue: bytes, owner: bytes, recipient: bytes, amount_wei: int) -> Claim:
        self._claimed[queue] += 1
        return Claim(queue, self._claimed[queue], owner, recipient, amount_wei)

    def _amount_wei(self) -> int:
        """More than 0: mostly a usual sum, sometimes a few wei, sometimes anything up to the largest uint256."""
        draw = self._rng.random()
        if draw < 0.1:
            return self._rng.randint(1, 1000)
        if draw < 0.2:
            return self._rng.choice([2**256 - 1, self._rng.randint(1, 2**256 - 1)])
        if draw < 0.5:
            return self._rng.randint(1, 2048) * WEI_PER_ETH
        return self._rng.randint(1, 4096 * WEI_PER_ETH)

    def _any_account(self) -> str:
        return self._rng.choice(list(self._vaults))

    def _any_vault(self) -> bytes:
        return self._rng.choice(self._vaults[self._any_account()])

    def _vault_of_two_accounts(self) -> list[bytes]:
        return [self._rng.choice(self._vaults[account]) for account in self._rng.sample(list(self._vaults), 2)]

    def _any_queue(self) -> bytes:
        return self._rng.choice(self._queues)

    def _any_foreign(self) -> bytes:
        return self._rng.choice(self._foreign)


_DECK: dict[Callable[[Traffic], list[Act]], int] = {
    Traffic.one_funding: 4,
    Traffic.same_vault_twice: 1,
    Traffic.two_vaults_of_one_account: 1,
    Traffic.two_accounts: 1,
    Traffic.three_fundings: 1,
    Traffic.foreign_emitter_first: 1,
    Traffic.malformed_emitter_first: 1,
    Traffic.one_claim: 3,
    Traffic.claim_to_another: 1,
    Traffic.batch_claim: 1,
    Traffic.claim_of_nothing: 1,
    Traffic.claim_and_funding: 1,
    Traffic.foreign_contract: 1,
    Traffic.core_queue: 1,
    Traffic.reverted: 1,
}
DECK_SIZE = sum(_DECK.values())
