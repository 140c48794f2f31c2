"""Contract events in another form than the known one, and a version of the service that knows that form, too.

Run as a program this is that version: `python tests/newer_form.py ARGUMENTS` is `vaultevents ARGUMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable

from vaultevents.core import logs, reports
from vaultevents.core.events import WithdrawalClaimed
from vaultevents.core.units import Address, Wei
from vaultevents.devnet.acts import Claim, Funding, Publication, log_of
from vaultevents.devnet.blocks import Log

Setter = Callable[[object, str, object], object]


def odd_claim(claim: Claim) -> Log:
    """A claim without indexed arguments: the same first topic, and all four values in the data."""
    values = (claim.request_id.to_bytes(32), claim.owner.rjust(32, b"\0"), claim.recipient.rjust(32, b"\0"))
    return Log(claim.queue, log_of(claim).topics[:1], b"".join(values) + claim.amount_wei.to_bytes(32))


def odd_funding(funding: Funding) -> Log:
    """A funding with an indexed amount."""
    return Log(funding.vault, (*log_of(funding).topics, funding.amount_wei.to_bytes(32)), b"")


def odd_publication(publication: Publication) -> Log:
    """A report whose data has a word before the one that the known form begins with."""
    log = log_of(publication)
    return Log(log.address, log.topics, bytes(32) + log.data)


def install(set_attribute: Setter) -> None:
    """Make this process decode the odd forms, too; `set_attribute` is `setattr` or that of a monkeypatch."""
    known_problem, known_claim, known_amount, known_cid = (
        logs._problem,
        logs._claim,
        logs._amount_wei,
        reports._cid_text,
    )

    def problem(log: logs.Log) -> str | None:
        form = log.topics[0], len(log.topics), len(log.data)
        if form in ((logs.WITHDRAWAL_CLAIMED, 1, 128), (logs.ETHER_FUNDED, 2, 0)):
            return None
        return known_problem(log)

    def claim(log: logs.Log) -> WithdrawalClaimed:
        if len(log.topics) != 1:
            return known_claim(log)
        request_id, owner, recipient, amount = (log.data[at : at + 32] for at in range(0, 128, 32))
        return WithdrawalClaimed(
            tx_hash=log.tx_hash,
            request_id=int.from_bytes(request_id),
            recipient=Address(recipient[12:]),
            owner=Address(owner[12:]),
            amount_wei=Wei(int.from_bytes(amount)),
            queue=log.address,
        )

    def amount(log: logs.Log) -> Wei:
        return known_amount(log) if log.data else Wei(int.from_bytes(log.topics[1]))

    def cid(data: bytes) -> str | None:
        return known_cid(data[32:]) if not any(data[:32]) else known_cid(data)

    set_attribute(logs, "_problem", problem)
    set_attribute(logs, "_claim", claim)
    set_attribute(logs, "_amount_wei", amount)
    set_attribute(reports, "_cid_text", cid)


if __name__ == "__main__":
    from vaultevents.cli import main

    install(setattr)
    main()
