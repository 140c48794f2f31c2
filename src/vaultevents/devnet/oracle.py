"""The oracle of a simulation: it writes report files at intervals and publishes their roots and CIDs on the chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from vaultevents.devnet.acts import Publication
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.decks import Deck
from vaultevents.devnet.reportfile import Reference, Tree, VaultFees, VaultValues, report_file
from vaultevents.devnet.unixfs import cid_of

_WEI_PER_ETH = 10**18
_STRANGERS = 3
_STRANGERS_OF_A_LARGE_REPORT = 600  # some 300 kB: more than one chunk of IPFS


class Oracle:
    """Publishes in every `every`-th block (2 or more; never for None), as the contract at the address `lazy_oracle`.

    `vaults` are those of the simulation; a report holds those of them that exist at its reference slot, and strangers.
    A deck holds each kind of publication: plain ones, one that leaves out a vault, a large one, one about no vault at
    all, two in one block, and that of a foreign contract which reports other values of the same vaults. `files` are all
    report files by CID.
    """

    def __init__(self, rng: Random, chain: Chain, vaults: Sequence[bytes], every: int | None) -> None:
        if every is not None and every < 2:
            raise ValueError("two reports need two blocks or more between them")
        self.lazy_oracle = rng.randbytes(20)
        self.files: dict[str, bytes] = {}
        self._rng = rng
        self._chain = chain
        self._vaults = vaults
        self._every = every
        self._foreign = rng.randbytes(20)
        self._strangers = [rng.randbytes(20) for _ in range(_STRANGERS_OF_A_LARGE_REPORT)]
        self._fees_wei: dict[bytes, int] = {}
        self._ref_slot = 0
        self._previous_cid = ""
        self._deck: Deck[Callable[[Oracle], list[Publication]]] = Deck(rng, _KINDS)

    def publications(self) -> list[Publication]:
        """What the next block publishes, each in a transaction of its own."""
        due = self._every is not None and (self._chain.head.number + 1) % self._every == 0
        return self._deck.deal()(self) if due else []

    def plain(self) -> list[Publication]:
        return [self._publish(self._known())]

    def without_a_vault(self) -> list[Publication]:
        left_out = self._rng.choice(self._vaults)
        return [self._publish([vault for vault in self._known() if vault != left_out])]

    def large(self) -> list[Publication]:
        return [self._publish([*self._known(), *self._strangers[_STRANGERS:]])]

    def about_no_vault(self) -> list[Publication]:
        self._ref_slot, self._previous_cid = self._next_ref_slot(), ""
        timestamp_s = self._timestamp_s(self._ref_slot)
        return [Publication(self.lazy_oracle, timestamp_s, self._ref_slot, bytes(32), "", ())]

    def two_at_once(self) -> list[Publication]:
        """The second supersedes the first before anybody can have read its file."""
        return [self._publish(self._known(), 1), self._publish(self._known())]

    def by_a_foreign_contract(self) -> list[Publication]:
        """It names a true file, but its contract is not the oracle's: no vault can be updated with it."""
        ref_slot = self._next_ref_slot()
        tree, _, cid = self._write(self._known(), ref_slot)
        return [Publication(self._foreign, self._timestamp_s(ref_slot) + 1, ref_slot, tree.root, cid, ())]

    def _publish(self, vaults: Sequence[bytes], slots_back: int = 0) -> Publication:
        ref_slot = self._next_ref_slot(slots_back)
        tree, values, cid = self._write([vault for vault in vaults if self._exists(vault, ref_slot)], ref_slot)
        self._ref_slot, self._previous_cid = ref_slot, cid
        self._fees_wei.update((value.vault, value.fee_wei) for value in values)
        own = set(self._vaults)
        calldata = tuple((value.vault, tree.calldata(value)) for value in values if value.vault in own)
        return Publication(self.lazy_oracle, self._timestamp_s(ref_slot), ref_slot, tree.root, cid, calldata)

    def _write(self, vaults: Sequence[bytes], ref_slot: int) -> tuple[Tree, list[VaultValues], str]:
        fees = [self._fees(vault) for vault in vaults]
        values = [self._values(vault, own) for vault, own in zip(vaults, fees, strict=True)]
        tree, block = Tree(values), self._chain.last_block_at(ref_slot)
        reference = Reference(ref_slot, block.hash, block.number, block.timestamp_s)
        content = report_file(tree, values, fees, reference, self._previous_cid)
        cid = cid_of(content)
        self.files[cid] = content
        return tree, values, cid

    def _known(self) -> list[bytes]:
        return [*self._strangers[:_STRANGERS], *self._vaults]

    def _exists(self, vault: bytes, ref_slot: int) -> bool:
        return vault not in self._vaults or self._chain.has_code(vault, self._chain.last_block_at(ref_slot).number)

    def _next_ref_slot(self, slots_back: int = 0) -> int:
        """After the last one and not after the head: the newest slot without a block, else the newest there is."""
        founded = self._chain.blocks(1, 1)[0].slot
        newest = self._chain.head.slot - slots_back
        missed = (
            slot
            for slot in range(newest, max(self._ref_slot, founded), -1)
            if self._chain.last_block_at(slot).slot != slot
        )
        return next(missed, max(newest, self._ref_slot + 1))

    def _timestamp_s(self, ref_slot: int) -> int:
        """The time of the reference slot, whether or not it has a block."""
        return self._chain.blocks(0, 0)[0].timestamp_s + ref_slot * self._chain.seconds_per_slot

    def _fees(self, vault: bytes) -> VaultFees:
        parts = [self._rng.randint(0, _WEI_PER_ETH // 1000) for _ in range(3)]
        delta_wei = self._rng.randint(-_WEI_PER_ETH, 100 * _WEI_PER_ETH)
        return VaultFees(delta_wei, self._fees_wei.get(vault, 0), *parts)

    def _values(self, vault: bytes, fees: VaultFees) -> VaultValues:
        total_wei = self._rng.randint(1, 4096 * _WEI_PER_ETH)
        shares = self._rng.choice([0, self._rng.randint(0, total_wei)])
        reserve_wei = self._rng.choice([0, self._rng.randint(0, _WEI_PER_ETH)])
        return VaultValues(vault, total_wei, fees.cumulative_wei, shares, shares + reserve_wei, reserve_wei)


_KINDS: dict[Callable[[Oracle], list[Publication]], int] = {
    Oracle.plain: 2,
    Oracle.without_a_vault: 1,
    Oracle.large: 1,
    Oracle.about_no_vault: 1,
    Oracle.two_at_once: 1,
    Oracle.by_a_foreign_contract: 1,
}
REPORT_DECK_SIZE = sum(_KINDS.values())
"""So many publications in a row contain every kind."""
