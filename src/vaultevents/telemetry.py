"""Log format with redaction: logs go to stderr, as text on a terminal and as JSON lines in a pipe."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

import structlog

_SECRET = re.compile(r"\b(whsec_|vek_)[A-Za-z0-9+/=_-]+")
_TOKEN = re.compile(r"\beyJ[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*")  # a JWT: a JSON object in base64url
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://)([^\s'\"]+)", re.IGNORECASE)
_AFTER_HOST = re.compile(r"[/?#\\].*", re.DOTALL)
_NODE_HASH = re.compile(r"#[0-9a-f]{8}(?![0-9a-zA-Z/?#@\\])[^/?#@\\]*")


def redact(text: str) -> str:
    """The text without webhook secrets, API keys and tokens, URLs cut down to scheme and host: the rest may hold keys.

    What `node_name` made (`https://host#1a2b3c4d`) stays whole. Where an @ leaves open what is host and what is
    password, not even the host is shown.
    """
    return _URL.sub(_without_secrets, _TOKEN.sub("eyJ***", _SECRET.sub(r"\1***", text)))


def _without_secrets(url: re.Match[str]) -> str:
    scheme, rest = url.groups()
    after = _AFTER_HOST.search(rest)
    authority, tail = (rest[: after.start()], after[0]) if after else (rest, "")
    if "@" in tail:
        return f"{scheme}***"
    host = authority.rpartition("@")[2]
    return f"{scheme}{host}{tail}" if _NODE_HASH.fullmatch(tail) else f"{scheme}{host}"


def _redacted(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_redacted(item) for item in value]
    if isinstance(value, Mapping):
        return {redact(str(key)): _redacted(item) for key, item in value.items()}
    return redact(str(value))


def _redact_event(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {key: _redacted(value) for key, value in event.items()}


class _Stderr:
    """Looks `sys.stderr` up at each line, so that a progress display may stand in front of it.

    A line that cannot be written, to a closed pipe or a full disk, is lost: a log never stops the work.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


class _FromLibraries(logging.Handler):
    """Gives what libraries and asyncio log the same form and the same redaction."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger().bind(logger=record.name)
        say = log.error if record.levelno >= logging.ERROR else log.warning
        say(record.getMessage(), exc_info=record.exc_info)


def configure_logging(level: str = "info", form: Literal["auto", "text", "json"] = "auto") -> None:
    """Sets up logging for the process; `auto` writes text to a terminal and JSON to anything else."""
    as_text = form == "text" or (form == "auto" and sys.stderr.isatty())
    colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer(colors=colours) if as_text else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _redact_event,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=_Stderr()),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if not isinstance(handler, _FromLibraries)]
    root.addHandler(_FromLibraries(logging.WARNING))
    logging.captureWarnings(True)
