"""Who sends to whom, as an SVG: trainer ranks on the left, workers on the right, a line's width by its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from awexd.dryrun.report import Moved, Pair, Report, workers_of
from awexd.dryrun.table import size
from awexd_transports.names import Ints

MOST = 16
"""Boxes on a side; where there are more ranks, neighbours share one."""
WIDTH, LEFT, RIGHT, TOP, STEP, BOX = 960, 210, 750, 96, 38, 28
THINNEST = 0.3
"""Of a line; the thickest box has lines from edge to edge."""

STYLE = """
svg { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --soft: #57606a; --box: #eef1f4; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --ink: #e6edf3; --soft: #9da7b3; --box: #1f2630; }
}
.paper { fill: var(--paper); }
text { fill: var(--ink); font: 13px system-ui, sans-serif; }
.title { font-size: 17px; font-weight: 600; }
.soft { fill: var(--soft); font-size: 12px; }
.box { fill: var(--box); stroke: var(--soft); stroke-width: 0.5; }
.link { fill: none; stroke-opacity: 0.6; }
.link:hover { stroke-opacity: 1; }
"""


class Group(NamedTuple):
    """Neighbouring ranks in one box: ``[first, end)`` of the traffic's rows or columns."""

    label: str
    first: int
    end: int


def picture(report: Report) -> str:
    """The SVG document. A pair that does not work has boxes, and no lines."""
    pair = report.pair
    workers = workers_of(pair)
    left = _grouped([("", rank) for rank in range(len(pair.trainer))])
    right = _grouped(workers)
    height = TOP + STEP * max(len(left), len(right)) + 24
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ' role="img">',
        f"<title>{escape(_title(pair))}</title>",
        f"<style>{escape(STYLE)}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="24" y="32">{escape(_title(pair))}</text>',
        f'<text class="soft" x="24" y="54">{escape(_subtitle(report))}</text>',
        f'<text class="soft" x="{LEFT}" y="{TOP - 14}" text-anchor="end">trainer ranks, bytes sent</text>',
        f'<text class="soft" x="{RIGHT}" y="{TOP - 14}">workers, bytes received</text>',
    ]
    lines = _lines(report.moved, left, right, height) if report.moved else ()
    sends = _sums(report.moved.sends, left) if report.moved else [0] * len(left)
    receives = _sums(report.moved.receives, right) if report.moved else [0] * len(right)
    boxes = [*_boxes(left, sends, height, is_left=True), *_boxes(right, receives, height, is_left=False)]
    return "\n".join([*head, *lines, *boxes, "</svg>", ""])


def _title(pair: Pair) -> str:
    names = [engine.name for engine in pair.engines]
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{pair.trainer.name} to {pair.infer or shown}"


def _subtitle(report: Report) -> str:
    if report.moved is None:
        return "does not work: names or shapes do not fit"
    copies, nbytes = report.moved.traffic
    return f"{int(copies.sum()):,} copies, {size(int(nbytes.sum()))} over {report.moved.links:,} links"


def _grouped(ranks: Sequence[tuple[str, int]]) -> list[Group]:
    """At most ``MOST`` boxes, of ranks of one engine each, where engines are not more than that."""
    each = 1
    while True:
        found = _boxed(ranks, each)
        if len(found) <= MOST or each > len(ranks):
            break
        each *= 2
    if len(found) > MOST:  # more engines than boxes
        share = -(-len(found) // MOST)
        chunks = [found[at : at + share] for at in range(0, len(found), share)]
        found = [Group(f"{chunk[0].label} to {chunk[-1].label}", chunk[0].first, chunk[-1].end) for chunk in chunks]
    return found


def _boxed(ranks: Sequence[tuple[str, int]], each: int) -> list[Group]:
    found: list[Group] = []
    for name, members in groupby(enumerate(ranks), key=lambda item: item[1][0]):
        numbers = [(at, rank) for at, (_, rank) in members]
        for low in range(0, len(numbers), each):
            some = numbers[low : low + each]
            first, last = some[0][1], some[-1][1]
            label = f"{first}" if first == last else f"{first}-{last}"
            shown = f"{name} / {label}" if name else f"rank {label}" if first == last else f"ranks {label}"
            found.append(Group(shown, some[0][0], some[-1][0] + 1))
    return found


def _sums(values: Ints, groups: Sequence[Group]) -> list[int]:
    return [int(values[group.first : group.end].sum()) for group in groups]


def _middle(at: int, count: int, height: int) -> float:
    """Of the ``at``-th box: the shorter side stands in the middle."""
    spare = (height - TOP - 24 - STEP * count) / 2
    return TOP + spare + STEP * at + BOX / 2


def _lines(moved: Moved, left: Sequence[Group], right: Sequence[Group], height: int) -> Iterator[str]:
    """Lines leave and reach a box side by side: what they cover of its edge is its load."""
    rows = np.add.reduceat(moved.traffic.nbytes, [group.first for group in left], axis=0)
    summed = np.add.reduceat(rows, [group.first for group in right], axis=1)
    scale = BOX / max(1, int(summed.sum(axis=1).max(initial=0)), int(summed.sum(axis=0).max(initial=0)))
    leave = [_middle(at, len(left), height) - scale * load / 2 for at, load in enumerate(summed.sum(axis=1).tolist())]
    reach = [_middle(at, len(right), height) - scale * load / 2 for at, load in enumerate(summed.sum(axis=0).tolist())]
    for source, to in np.argwhere(summed > 0).tolist():
        nbytes = int(summed[source, to])
        width = scale * nbytes
        y0, y1 = leave[source] + width / 2, reach[to] + width / 2
        leave[source] += width
        reach[to] += width
        names = f"data-source={quoteattr(left[source].label)} data-destination={quoteattr(right[to].label)}"
        middle, hue = (LEFT + RIGHT) // 2, 360 * source // len(left)
        yield (
            f'<path class="link" {names} data-bytes="{nbytes}" stroke="hsl({hue}, 65%, 52%)"'
            f' stroke-width="{max(THINNEST, width):.2f}"'
            f' d="M{LEFT} {y0:.2f}C{middle} {y0:.2f} {middle} {y1:.2f} {RIGHT} {y1:.2f}">'
            f"<title>{escape(left[source].label)} to {escape(right[to].label)}: {size(nbytes)}</title></path>"
        )


def _boxes(groups: Sequence[Group], loads: Sequence[int], height: int, *, is_left: bool) -> Iterator[str]:
    for at, (group, load) in enumerate(zip(groups, loads, strict=True)):
        y = _middle(at, len(groups), height)
        x = 24 if is_left else RIGHT
        wide = LEFT - 24 if is_left else WIDTH - 24 - RIGHT
        yield f'<rect class="box" x="{x}" y="{y - BOX / 2:g}" width="{wide}" height="{BOX}" rx="4"/>'
        yield f'<text x="{x + 8}" y="{y + 4:g}">{escape(_short(group.label))}</text>'
        yield f'<text class="soft" x="{x + wide - 8}" y="{y + 4:g}" text-anchor="end">{size(load)}</text>'


def _short(label: str) -> str:
    return label if len(label) <= 18 else f"{label[:17]}…"
