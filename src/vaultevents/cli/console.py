"""console: a link that logs a browser in to the console, once."""

from __future__ import annotations

from vaultevents.cli.options import ConfigOption, JsonOption
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, say
from vaultevents.config import ConsoleSettings
from vaultevents.console.sessions import Link, new_link
from vaultevents.core.errors import ConfigError
from vaultevents.store.console_sessions import LINK_VALID_S
from vaultevents.wiring.database import open_store


def console(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print a link that logs a browser in to the console, once.

    The link is good for 10 minutes. Its last part, after the '#', is a secret that the browser does not send in a URL.
    """
    settings = settings_of(config)
    if settings.console.serve == "off":
        raise ConfigError('console.serve is "off", so there is no console: set it to "on" and restart')
    origin = origin_of(settings.console)

    async def work() -> Link:
        async with open_store(settings) as store:
            return await new_link(store.database, origin)

    link = complete(work())
    if as_json:
        put_json({"link": link.url, "validUntil": link.valid_until.isoformat(timespec="seconds")})
        return
    say(f"Open this link within {LINK_VALID_S // 60} minutes, in one browser, while 'vaultevents run' runs:")
    say(link.url)


def origin_of(settings: ConsoleSettings) -> str:
    """Return where a browser reaches the console. Raises `ConfigError` where only the running process knows."""
    if settings.public_origin is not None:
        return settings.public_origin
    if settings.port == 0:
        raise ConfigError("console.port is 0, so only the log of 'vaultevents run' says where it is: set a port")
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)  # noqa: S104  # not bound here
    scheme = "http" if settings.certificate_file is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{settings.port}"
