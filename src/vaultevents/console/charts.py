"""Plots as SVG, made on the server. Colours are classes of the style sheet; texts around a plot are HTML, so that they
keep their size on a phone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

WIDTH: Final = 600
BAR_HEIGHT: Final = 120
GAP: Final = 1.0


@dataclass(frozen=True, slots=True)
class Column:
    """A bar: its label, and the value of each kind from the bottom up."""

    label: str
    values: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.values.values())


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a span of time, from the beginning of the whole; `kind` is a class of the style sheet."""

    label: str
    begins: float
    ends: float
    kind: str = "later"


def stacked_bars(columns: Sequence[Column], kinds: Sequence[str], label: str) -> Markup:
    """Draw a bar for each column, as high as its total; a bar has its label and values as its tooltip."""
    highest = max((column.total for column in columns), default=0.0) or 1.0
    step = WIDTH / max(len(columns), 1)
    bars = []
    for place, column in enumerate(columns):
        parts, base = [], float(BAR_HEIGHT)
        for kind in kinds:
            height = column.values.get(kind, 0.0) / highest * BAR_HEIGHT
            if height > 0:
                base -= height
                parts.append(_rect(kind, place * step, base, step - GAP, height))
        words = ", ".join(f"{value:,.0f} {kind}" for kind, value in column.values.items() if value)
        title = Markup("<title>{}: {}</title>").format(column.label, words or "0")
        bars.append(Markup("<g>{}{}</g>").format(title, Markup("").join(parts)))
    return _svg(WIDTH, BAR_HEIGHT, label, Markup("").join(bars), "bars")


def timing_bar(phases: Sequence[Phase], whole: float, label: str) -> Markup:
    """Draw phases on one line that is `whole` long."""
    scale = WIDTH / (whole or 1.0)
    parts = [
        Markup("<g><title>{}</title>{}</g>").format(
            phase.label,
            _rect(phase.kind, phase.begins * scale, 2, max((phase.ends - phase.begins) * scale, 1.0), 10),
        )
        for phase in phases
    ]
    return _svg(WIDTH, 14, label, Markup("").join(parts), "timing")


def distance_mark(distance: float, farthest: float, label: str) -> Markup:
    """Draw a mark on a line whose right end is distance 0; the scale is logarithmic."""
    share = math.log1p(max(distance, 0.0)) / (math.log1p(max(farthest, 1.0)))
    x = 8 + (WIDTH - 16) * (1 - min(share, 1.0))
    line = Markup('<path class="line" d="M8 10H{}"/>').format(WIDTH - 8)
    mark = _rect("later", x - 3, 2, 6, 16)
    return _svg(WIDTH, 20, label, line + mark, "distance")


def swatch(kind: str) -> Markup:
    """Draw a square in the colour of a kind, for a legend."""
    return Markup('<svg viewBox="0 0 10 10" aria-hidden="true">{}</svg>').format(_rect(kind, 0, 0, 10, 10))


def _rect(kind: str, x: float, y: float, width: float, height: float) -> Markup:
    return Markup('<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"/>').format(
        kind, x, y, max(width, 0.5), height
    )


def _svg(width: int, height: int, label: str, content: Markup, kind: str) -> Markup:
    return Markup(
        '<svg class="{}" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(kind, width, height, label, content)
