"""Take the pictures of docs/pictures from the demo: `python3 dev.py pictures`.

The console in Chromium, the terminal by rich. A digest of what the pages are rendered from is stored beside them, so
that a test can say when they are out of date.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil
from playwright.async_api import Browser, Page
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from browser_fixtures import WIDTHS, running_browser, watched_page
from timeouts import WAIT_TIMEOUT_S, wait_until

ROOT: Final = Path(__file__).resolve().parents[1]
PICTURES: Final = ROOT / "docs" / "pictures"
DIGEST: Final = PICTURES / "templates.sha256"
SOURCES: Final = ROOT / "src" / "vaultevents" / "console"
COMMAND: Final = "python3 dev.py pictures"
MAX_BYTES: Final = 200_000
VAULTEVENTS: Final = (sys.executable, "-m", "vaultevents")
TERMINAL_WIDTH: Final = 110
SHOWN_AFTER_S: Final = 20.0
"""Until then the demo has sent its history, and some of what came after it."""
HEIGHTS: Final = {360: 740, 1280: 960}

PAGES: Final = ("overview", "event", "webhook")
TERMINAL: Final = "status.svg"
NAMES: Final = (*(f"{page}-{width}.png" for page in PAGES for width in WIDTHS), TERMINAL)

# As rich has it, without the fonts that a browser would load from another host.
SVG: Final = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px;
  line-height: {line_height}px;
  font-variant-east-asian: full-width;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def templates_digest(sources: Path = SOURCES) -> str:
    """Return a digest of the templates, the style sheet and the charts that the pages are rendered from."""
    files = [*sources.glob("templates/**/*.html"), *sources.glob("static/*.css"), *sources.glob("charts.py")]
    state = hashlib.sha256()
    for file in sorted(files):
        state.update(file.relative_to(sources).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return state.hexdigest()


# `status` asks the execution node alone; the rest only has to be named.
CONFIGURATION: Final = """network = "devnet"
chain_id = {chain_id}
data_dir = "{data_dir}"
execution.urls = ["{node}"]
beacon.urls = ["{node}"]
reports.gateways = ["{node}"]
contracts.lazy_oracles = ["0x0000000000000000000000000000000000000001"]
console.port = {port}
"""


@contextlib.contextmanager
def running_demo(directory: Path) -> Iterator[Path]:
    """Run the demo in `directory` until the end of the block; yield a configuration for commands that look at it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*VAULTEVENTS, "demo", "--console-port", str(port)]
    with (directory / "demo.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(directory)})
    try:
        wait_until(lambda: process.poll() is not None or _listens(port))
        assert process.poll() is None, (directory / "demo.log").read_text()
        node, chain_id = _node(process.pid)
        (data_dir,) = directory.glob("vaultevents-demo-*")
        config = directory / "vaultevents.toml"
        config.write_text(CONFIGURATION.format(chain_id=chain_id, data_dir=data_dir, node=node, port=port))
        yield config
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_TIMEOUT_S)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def _node(pid: int) -> tuple[str, int]:
    """Return the URL of the execution node among the servers of a process, and its chain id."""
    listening = [
        item.laddr for item in psutil.Process(pid).net_connections("tcp4") if item.status == psutil.CONN_LISTEN
    ]
    urls = [f"http://{address.ip}:{address.port}" for address in listening]
    return next((url, number) for url in urls if (number := _chain_id(url)) is not None)


def _chain_id(url: str) -> int | None:
    """Return the chain id of the execution node at `url`; None where another server answers."""
    call = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "eth_chainId", "params": []}).encode()
    request = urllib.request.Request(url, call, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(json.loads(answer.read())["result"], 16)
    except (OSError, HTTPException, ValueError, KeyError):
        return None


def terminal_picture(command: str, output: str) -> str:
    """Return an SVG of a terminal with a command and its output, ANSI colours included."""
    console = Console(
        record=True, width=TERMINAL_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(output.rstrip()))
    return console.export_svg(title="vaultevents", theme=DIMMED_MONOKAI, code_format=SVG, unique_id="vaultevents")


def output_of(command: str, config: Path) -> str:
    """Return what a command prints on a terminal."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(TERMINAL_WIDTH)}
    done = subprocess.run(
        [*VAULTEVENTS, command, "--config", str(config)], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


async def photograph(browser: Browser, config: Path) -> None:
    """Take the pictures of the console's pages."""
    (link,) = re.findall(r"http://\S+/login#[\w-]+", output_of("console", config))
    origin = link.partition("/login")[0]
    async with watched_page(browser, origin) as watched:
        page = watched.page
        await page.goto(link)
        await page.wait_for_url(f"{origin}/")
        addresses = {
            "overview": f"{origin}/",
            "event": await _first(page, f"{origin}/events?type=validator_withdrawal_completed&account=borealis"),
            "webhook": await _first(page, f"{origin}/webhooks?text=fails-once"),
        }
        for name, address in addresses.items():
            await page.goto(address)
            for width in WIDTHS:
                await page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
                await page.screenshot(path=PICTURES / f"{name}-{width}.png")
        assert watched.problems == []


async def _first(page: Page, address: str) -> str:
    """Return the address of the page of the first row of a list."""
    await page.goto(address)
    path = urlsplit(address).path
    await page.locator(f"main table a[href^='{path}/']").first.click()
    await page.wait_for_load_state()
    return page.url


async def take() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, running_demo(Path(directory)) as config:
        async with running_browser() as browser:
            await asyncio.sleep(SHOWN_AFTER_S)
            await photograph(browser, config)
        (PICTURES / TERMINAL).write_text(terminal_picture("vaultevents status", output_of("status", config)))
    DIGEST.write_text(f"{templates_digest()}\n")
    for name in NAMES:
        print(f"{name}: {(PICTURES / name).stat().st_size} bytes")


if __name__ == "__main__":
    asyncio.run(take())
