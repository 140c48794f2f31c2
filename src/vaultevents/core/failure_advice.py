"""Explain why an attempt was not accepted, and what the receiver's owner or the operator has to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Advice:
    """What a failure means, and what to do, each one or two sentences."""

    meaning: str
    action: str


ERRORS: Final[dict[str, Advice]] = {
    "refused_url": Advice(
        "The URL breaks the rules for webhooks, so nothing was sent.",
        "Give the webhook a public https URL at an allowed port, or allow its network in the settings.",
    ),
    "refused_address": Advice(
        "The host name leads to an address that may not be contacted, such as a private one. Nothing was sent.",
        "Let the name lead to public addresses alone, or allow the network in the settings.",
    ),
    "dns": Advice(
        "The host name of the receiver has no address, or its name servers did not answer.",
        "Check the DNS records of the host name in the URL.",
    ),
    "tls": Advice(
        "TLS failed: the certificate is expired, of another name or of an unknown authority, or the handshake ended.",
        "Renew or correct the certificate of the receiver, and send the whole chain.",
    ),
    "connect_timeout": Advice(
        "The receiver did not accept a connection in time.",
        "Check that the receiver runs, and that no firewall drops packets from this service.",
    ),
    "connect": Advice(
        "The connection was refused: nothing listens at this address and port, or a firewall rejects it.",
        "Start the receiver, or correct host and port of the URL.",
    ),
    "timeout": Advice(
        "The receiver was connected and did not answer in time. It may have the event all the same.",
        "Let the receiver answer 2xx as soon as it has stored the event, and process it afterwards.",
    ),
    "reset": Advice(
        "The connection ended before a complete answer. The receiver may have the event all the same.",
        "Look for crashes, restarts and limits of the receiver or of the proxy in front of it.",
    ),
    "protocol": Advice(
        "What came back is no HTTP answer, or one with too large headers.",
        "Check that the URL leads to an HTTPS server, and not to another service.",
    ),
    "proxy": Advice(
        "The operator's proxy works and did not connect to the receiver.",
        "Operator: look at 'proxy_refused' in the log, and allow the receiver at the proxy.",
    ),
    "local": Advice(
        "This host had no file descriptor, port or route left. Nothing was sent, and the attempt does not count.",
        "Operator: look at 'attempts_put_back' in the log, and raise the limits of this host.",
    ),
    "resolver": Advice(
        "The resolver of this host did not answer. Nothing was sent, and the attempt does not count.",
        "Operator: check the name servers of this host.",
    ),
    "proxy_down": Advice(
        "The operator's proxy cannot be reached. Nothing was sent, and the attempt does not count.",
        "Operator: start the proxy, or correct its address in the settings.",
    ),
    "sealed": Advice(
        "The secret of the webhook cannot be opened with the master keys of this process. Nothing was sent.",
        "Operator: give this process the master key under which the secret was sealed, or rotate the secret.",
    ),
}
"""By the error of an attempt."""

_STATUSES: Final[dict[int, Advice]] = {
    401: Advice(
        "The receiver asks for a login, or refused the signature.",
        "Let the receiver verify the signature with the present secret of the webhook, and ask for nothing else.",
    ),
    403: Advice(
        "The receiver, or a firewall in front of it, forbids the request.",
        "Allow this service at the firewall; verify the signature with the present secret of the webhook.",
    ),
    404: Advice("There is nothing at this path.", "Correct the path of the URL."),
    405: Advice("The path accepts no POST.", "Correct the path of the URL, or accept POST."),
    408: Advice(
        "The receiver gave up waiting for the request.", "Look for limits of time at the receiver or its proxy."
    ),
    410: Advice(
        "The receiver says that it is gone: the webhook was switched off at once.",
        "If it was a mistake, answer 2xx again; then switch the webhook on and recover what was missed.",
    ),
    413: Advice("The receiver refuses the size of the body.", "Accept bodies of at least 1 MiB."),
    429: Advice(
        "The receiver asks for fewer requests; its Retry-After is respected.",
        "Raise the rate limit of the receiver for this service.",
    ),
    503: Advice(
        "The receiver is overloaded or under maintenance; its Retry-After is respected.",
        "Wait for the receiver, or start more of it.",
    ),
}

_CLASSES: Final[dict[int, Advice]] = {
    1: Advice("The receiver sent no final answer.", "Let the receiver answer 2xx."),
    3: Advice("The receiver redirects, and redirects are not followed.", "Enter the final address as URL."),
    4: Advice(
        "The receiver refused the request.",
        "Look at the answer and at the receiver's log; only a 2xx counts as received.",
    ),
    5: Advice("The receiver failed while it handled the event.", "Look for the error in the receiver's log."),
}

_UNKNOWN: Final = Advice("The attempt failed.", "Look at the receiver's log.")


def explain(status: int | None, error: str | None) -> Advice:
    """Explain an attempt that was not accepted, by its HTTP status, or by its error where it has none."""
    if status is not None:
        return _STATUSES.get(status) or _CLASSES.get(status // 100, _UNKNOWN)
    return ERRORS.get(error or "", _UNKNOWN)
