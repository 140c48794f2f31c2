"""How the URL of a node is shown: it may hold a secret in its path, query or user part.

Only `node_name` and `scrub` put anything of a URL into text.
"""

from __future__ import annotations

import hashlib
import re
from urllib.parse import SplitResult, unquote, urlsplit

from vaultevents.core.errors import InputError

_SHORTEST_SECRET = 6
_ANY_URL = re.compile(r"\b[a-z][a-z0-9+.-]{1,15}://\S+", re.IGNORECASE)


def node_name(url: str, schemes: tuple[str, str] = ("http", "https")) -> str:
    """`scheme://host#12345678`: the host and a short hash of the whole URL, which distinguishes two keys.

    Raises `InputError` for what is not a URL of one of the `schemes`.
    """
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]
    parts = _split(url)
    if parts is None or parts.scheme not in schemes or not parts.hostname:
        plain, tls = schemes
        raise InputError(f"the node URL #{digest} is not usable: write {plain}://host:port/path or {tls}://host/path")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}#{digest}"


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for a port that is no number
    except ValueError:
        return None
    return parts


def scrub(text: str, url: str) -> str:
    """A node's own words, fit for a log: one line of at most 200 characters, with no URL and no secret of ours."""
    text = text[:4000]
    for secret in _secrets(url):
        text = text.replace(secret, "…")
    text = _ANY_URL.sub("<url>", text)
    return "".join(c if c.isprintable() else " " for c in text)[:200]


def _secrets(url: str) -> list[str]:
    parts = urlsplit(url)
    pieces = {url, parts.path, parts.query, parts.username or "", parts.password or ""}
    pieces.update(re.split(r"[/&=;]", f"{parts.path}&{parts.query}"))
    pieces |= {unquote(piece) for piece in pieces}
    return sorted((piece for piece in pieces if len(piece) >= _SHORTEST_SECRET), key=len, reverse=True)
