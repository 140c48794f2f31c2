"""Strings that execute a script where a page does not escape them, and a page that does not.

Each one sets `window.xss` when it runs, or leaves an element or attribute that no page of ours has. A string is
dangerous at one place: in text, in an attribute, as a link, in a script, or where encoded text is decoded once too
often. `careless_page` puts each of them there, as the negative control of what looks for them.
"""

from __future__ import annotations

import html
import json
from typing import Final, Literal
from urllib.parse import unquote

Place = Literal["text", "double", "single", "link", "script", "escaped", "percent", "json", "title", "comment"]

XSS_STRINGS: Final[tuple[tuple[Place, str], ...]] = (
    ("text", "<script>window.xss=1</script>"),
    ("text", "<ScRiPt >window.xss=1</sCrIpT >"),
    ("text", "<script src=data:text/javascript,window.xss=1></script>"),
    ("text", "<script type=module>window.xss=1</script>"),
    ("text", "<img src=x onerror=window.xss=1>"),
    ("text", '<img/src="x"/onerror="window.xss=1"/>'),
    ("text", "<img src=x onerror\n=\nwindow.xss=1>"),
    ("text", "<svg onload=window.xss=1>"),
    ("text", "<svg><script>window.xss=1</script></svg>"),
    ("text", "<svg><animate onbegin=window.xss=1 attributeName=x dur=1s></svg>"),
    ("text", "<math><mtext></mtext><img src=x onerror=window.xss=1></math>"),
    ("text", "<body onload=window.xss=1>"),
    ("text", "<iframe srcdoc='<script>parent.xss=1</script>'></iframe>"),
    ("text", "<iframe src=javascript:parent.xss=1></iframe>"),
    ("text", "<object data=javascript:window.xss=1></object>"),
    ("text", "<embed src=javascript:window.xss=1>"),
    ("text", "<details open ontoggle=window.xss=1><summary>x</summary></details>"),
    ("text", "<video><source onerror=window.xss=1 src=x></video>"),
    ("text", "<input autofocus onfocus=window.xss=1>"),
    ("text", "<style>@keyframes xss{}*{animation:xss 1s}</style><b onanimationstart=window.xss=1>x</b>"),
    ("text", "<form action=javascript:window.xss=1><button>x</button></form>"),
    ("text", "<a href=javascript:window.xss=1>x</a>"),
    ("text", "<base href=//attacker.example/>"),
    ("text", "<meta http-equiv=refresh content='0;url=javascript:window.xss=1'>"),
    ("text", "</td></tr></table></main></section><script>window.xss=1</script>"),
    ("text", "</pre></code><script>window.xss=1</script><pre>"),
    ("title", "</title><script>window.xss=1</script>"),
    ("comment", "--><script>window.xss=1</script><!--"),
    ("double", '"><script>window.xss=1</script>'),
    ("double", '" autofocus onfocus="window.xss=1'),
    ("double", '" onmouseover="window.xss=1" style="position:fixed;inset:0'),
    ("single", "' autofocus onfocus='window.xss=1"),
    ("link", "javascript:window.xss=1"),
    ("link", "JaVa\tScript:window.xss=1"),
    ("link", "data:text/html,<script>opener.xss=1</script>"),
    ("script", '";window.xss=1;//'),
    ("script", "</script><script>window.xss=1</script>"),
    ("escaped", "&lt;script&gt;window.xss=1&lt;/script&gt;"),
    ("percent", "%3Cimg%20src%3Dx%20onerror%3Dwindow.xss%3D1%3E"),
    ("json", "\\u003cimg src=x onerror=window.xss=1\\u003e"),
)

XSS_GROUPS: Final = tuple(XSS_STRINGS[number : number + 4] for number in range(0, len(XSS_STRINGS), 4))
"""Four strings each, which are stored as one text: `joined`. Pages take long to load, and there are fewer then."""


def joined(group: tuple[tuple[Place, str], ...]) -> str:
    """Return the strings of a group as one text."""
    return " ".join(text for _, text in group)


def careless_page(place: Place, text: str) -> str:
    """Return a page that puts `text` where it is dangerous, without escaping it."""
    parts = {
        "text": f"<p>{text}</p>",
        "double": f'<input value="{text}">',
        "single": f"<input value='{text}'>",
        "link": f'<a href="{text}">x</a>',
        "script": f'<script>const value = "{text}";</script>',
        "escaped": html.unescape(text),
        "percent": unquote(text),
        "json": json.loads(f'"{text}"') if place == "json" else "",
        "comment": f"<!-- {text} -->",
    }
    title = text if place == "title" else "x"
    return f"<!doctype html><title>{title}</title><main>{parts.get(place, '')}</main>"
