"""The settings of a command."""

from __future__ import annotations

from pathlib import Path

from vaultevents import config
from vaultevents.config import Settings
from vaultevents.telemetry import configure_logging


def settings_of(path: Path | None) -> Settings:
    """Return the settings for a command; set up logging as they say."""
    settings = config.load(path)
    configure_logging(settings.log.level, settings.log.format)
    return settings
