"""The whole exception tree.

    VaulteventsError
    ├── OperatorError            a person must fix it; its text is one sentence that says what to do; exit code 1
    │   ├── ConfigError            a setting
    │   ├── InputError             an argument, an address, an id, a URL
    │   │   ├── CursorUnknown        of a page: altered, foreign, or of another list (core/pagination.py)
    │   │   └── JsonMalformed        bytes that are not JSON, or can be read in two ways (core/jsonbody.py)
    │   ├── DatabaseUnusable       of a newer or altered schema, too old, wrong key, no privilege (store/sqlstates.py)
    │   ├── ContractMismatch       a contract answers in another form than its ABI (chain/execution/contracts.py)
    │   │   └── NoContract           there is no code at the address
    │   ├── SealBroken             a sealed secret does not open (core/sealing.py)
    │   ├── WrongNetwork           a node of another chain than the one this database is pinned to (rule E10)
    │   └── StreamStopped          a stream that must not go on by itself
    ├── TokenRejected            a request's token that does not authenticate it (core/tokens.py)
    ├── TokenReplayed, StepUpRefused                        a refused change (store/authorized_transaction.py)
    ├── WebhookUnknown, VaultsUnknown                       (store/webhooks.py)
    ├── TooManyWebhooks, IdempotencyConflict                (store/webhook_management.py)
    ├── ReportInvalid            bytes of which nothing can be made for a report (core/reports.py)
    │   ├── NotTheFile             they are not those of the event's CID: the fault of who gave them
    │   └── ReportUndecodable      they are, or the CID is of an unknown form: the fault of the report itself
    ├── EgressRefused            a URL or address that may not be dialled (egress.py)
    ├── ProxyRefused             the operator's proxy did not connect to a receiver (proxy.py)
    ├── LocalFault               this host lacks descriptors, ports or a route, or its resolver or proxy is down
    ├── DatabaseUnavailable      lost or busy: start the transaction over from its reads
    └── SourceUnavailable        an upstream cannot answer now; try again, another node first
        ├── RangeTooLarge          the node wants a smaller block range or answer
        ├── NodeFault              an answer that contradicts itself or the chain (rule C2): the node is set aside
        └── ChainDisagreement      nodes give different final blocks (rule C2): the stream waits, and nothing is sent

Normal endings are values, not exceptions. Everything outside this tree is a bug and ends the process.
"""

from __future__ import annotations

from typing import Literal


class VaulteventsError(Exception):
    """Root of everything this package raises on purpose."""


class OperatorError(VaulteventsError):
    """A person must fix it: the text is one clear sentence that says what to do."""


class ConfigError(OperatorError):
    """A setting is missing, unknown or wrong."""


class InputError(OperatorError):
    """An argument of a command or a request is wrong."""


class DatabaseUnusable(OperatorError):
    """The database cannot be used as it is."""


class WrongNetwork(OperatorError):
    """The node belongs to another network than the database (rule E10)."""


class StreamStopped(OperatorError):
    """A stream met something that must never be skipped: final data of a validator has changed."""


class DatabaseUnavailable(VaulteventsError):
    """The database is gone, busy or full. Whether a commit took place is unknown: start over from the reads."""


class LocalFault(VaulteventsError, OSError):
    """This host cannot connect to anything or to something new; whatever it was about to reach is not at fault."""

    def __init__(self, kind: Literal["local", "resolver", "proxy_down"], problem: str) -> None:
        super().__init__(problem)
        self.kind = kind
        self.problem = problem


class SourceUnavailable(VaulteventsError):
    """An upstream cannot answer now. `node` is its redacted name."""

    def __init__(self, node: str, problem: str) -> None:
        super().__init__(f"{node}: {problem}")
        self.node = node
        self.problem = problem


class RangeTooLarge(SourceUnavailable):
    """The node refuses this block range or the size of its answer; a smaller one may work."""


class NodeFault(SourceUnavailable):
    """The node's answer contradicts itself or the chain (rule C2)."""


class ChainDisagreement(SourceUnavailable):
    """Nodes give different final blocks. Their answers do not show which is right (rule C2)."""
