"""Log format with redaction: logs go to stderr, as text on a terminal and as JSON lines in a pipe."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Literal

import structlog

_SECRET = re.compile(r"whsec_[A-Za-z0-9+/=_-]+")
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://(?:[^\s/@]*@)?([^\s/?#'\"]+)(?:[/?][^\s'\"]*)?")


def redact(text: str) -> str:
    """The text without webhook secrets, every URL cut down to scheme and host: the rest may hold keys."""
    return _URL.sub(r"\1://\2", _SECRET.sub("whsec_***", text))


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list | tuple):
        return [_redacted(item) for item in value]
    return value


def _redact_event(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {key: _redacted(value) for key, value in event.items()}


class _Stderr:
    """Looks `sys.stderr` up at each line, so that a progress display may stand in front of it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_logging(level: str = "info", form: Literal["auto", "text", "json"] = "auto") -> None:
    """Sets up logging for the process; `auto` writes text to a terminal and JSON to anything else."""
    as_text = form == "text" or (form == "auto" and sys.stderr.isatty())
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if as_text else structlog.processors.JSONRenderer()
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
