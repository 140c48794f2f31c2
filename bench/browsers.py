"""What ten open browsers cost the deliveries: `python3 dev.py bench browsers --json`.

A dispatcher that also serves the console delivers over plain HTTP at its full rate, without a browser and with ten that
have the overview open as `console.js` has it, a stream of changes and the page again at each, and poll it besides,
once a second. Rounds alternate; the best of each counts, because other load on the machine can only slow one down. The
browsers are a process of their own and share the two cores. The last line is the result; without `--json` a table
stands before it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
from _delivery import BenchSetup, add_webhooks, bench_setup, deliver
from _result import print_result

from vaultevents.console.rendering import FRAGMENT_HEADER
from vaultevents.console.sessions import new_link

BROWSERS = 10
COUNT = 90_000
ROUNDS = 4
WEBHOOKS = 100
GOAL = 0.97


async def _browse(url: str, code: str, number: int) -> None:
    """Be one browser until the process is killed; each one has a session of its own."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        for _ in range(600):  # until the dispatcher listens
            try:
                async with session.post(f"{url}/login", data={"code": code}, headers={"Origin": url}) as answer:
                    if answer.status != 200:
                        raise SystemExit(f"the login of browser {number} is answered with {answer.status}")
                break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)
        print("open", flush=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_follow(session, url, number))
            tasks.create_task(_poll(session, url))


async def _poll(session: aiohttp.ClientSession, url: str) -> None:
    """Load the page again every second."""
    while True:
        async with session.get(f"{url}/", headers={FRAGMENT_HEADER: "1"}) as page:
            await page.read()
            if page.status == 200:
                print("page", flush=True)
        await asyncio.sleep(1.0)


async def _follow(session: aiohttp.ClientSession, url: str, number: int) -> None:
    """Read the stream of changes, and load the page at each."""
    async with session.get(f"{url}/live?page=overview", timeout=aiohttp.ClientTimeout(total=None)) as stream:
        if stream.status != 200:
            raise SystemExit(f"the stream of browser {number} is answered with {stream.status}")
        async for line in stream.content:
            if line.startswith(b"event: changed"):
                async with session.get(f"{url}/", headers={FRAGMENT_HEADER: "1"}) as page:
                    await page.read()
                print("page", flush=True)


async def _links(made: BenchSetup) -> list[str]:
    async with made.database() as database:
        url = made.facts["console_url"]
        return [(await new_link(database, url)).url.partition("#")[2] for _ in range(BROWSERS)]


@contextmanager
def _browsers(made: BenchSetup, folder: Path) -> Iterator[Path]:
    """Ten browsers in a process of their own; the file that they note their doings in."""
    codes, notes = asyncio.run(_links(made)), folder / "browsers.txt"
    with notes.open("w") as file:
        command = [sys.executable, __file__, "browse", made.facts["console_url"], json.dumps(codes)]
        process = subprocess.Popen(command, stdout=file)
        try:
            yield notes
        finally:
            process.kill()
            process.wait()


async def _prepare(made: BenchSetup) -> list[str]:
    async with made.database() as database:
        return await add_webhooks(database, [made.url(f"/hook/{number}") for number in range(WEBHOOKS)])


def measure() -> dict[str, Any]:
    """Alternate rounds without and with browsers; the best of each, and the ratio of the rates."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, bench_setup(Path(folder), "http") as made:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            made.facts["console_url"] = f"http://127.0.0.1:{found.getsockname()[1]}"
        ids = asyncio.run(_prepare(made))
        asyncio.run(deliver(made, COUNT // 10, ids))  # warms up
        alone, beside, pages = [], [], 0
        for _ in range(ROUNDS):
            alone.append(asyncio.run(deliver(made, COUNT, ids)))
            with _browsers(made, Path(folder)) as notes:
                beside.append(asyncio.run(deliver(made, COUNT, ids)))
                said = notes.read_text().split()
            if said.count("open") != BROWSERS:
                raise SystemExit(f"{said.count('open')} of {BROWSERS} browsers were open")
            pages += said.count("page")
    if not pages:
        raise SystemExit("the browsers loaded no page")
    best, least = (max(rounds, key=lambda done: done["deliveries_s"]) for rounds in (beside, alone))
    ratio = best["deliveries_s"] / least["deliveries_s"]
    return {
        "bench": "browsers",
        "figures": {**{key: round(value, 1) for key, value in best.items()}, "pages": pages},
        "floor": {key: round(value, 1) for key, value in least.items()},
        "ratio": {"rate_x": round(ratio, 3)},
        "goal": {"rate_x": GOAL},
        "ok": ratio >= GOAL,
    }


async def _browse_all(url: str, codes: list[str]) -> None:
    await asyncio.gather(*(_browse(url, code, number) for number, code in enumerate(codes)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["browse"]:
        asyncio.run(_browse_all(sys.argv[2], json.loads(sys.argv[3])))
    else:
        sys.exit(print_result(measure(), as_json="--json" in sys.argv))
