"""Lay a graph out in layers and write it as SVG: boxes, arrows from below to above, in light and dark."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_ROW, _GAP, _MARGIN, _HEIGHT = 60, 26, 16, 30  # pixels: from layer to layer, between boxes, around all, of a box
_SWEEPS = 24

STYLE = """\
  .paper { fill: #ffffff; }
  .box { fill: #eef4fb; stroke: #4a78a8; }
  .arrow { fill: none; stroke: #7d8896; stroke-width: 1.3; }
  .tip { fill: #7d8896; }
  text { fill: #1d2733; font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; text-anchor: middle; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #17191d; }
    .box { fill: #22303f; stroke: #6f9fd0; }
    .arrow { stroke: #8a95a3; }
    .tip { fill: #8a95a3; }
    text { fill: #e4e9ef; }
  }
"""


class _Spot(NamedTuple):
    """Place of a box, or of the bend of an arrow that passes a layer.

    Attributes:
        name: of the box; that of the arrow's two ends for a bend.
        layer: counted from the ground.
    """

    name: str
    layer: int


def layers_of(uses: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the layer of each box: above all that it uses, and as near to those that use it as that allows.

    Args:
        uses: what each box uses, with those that are used before those that use them.
    """
    layer: dict[str, int] = {}
    for name, below in uses.items():
        layer[name] = 1 + max((layer[other] for other in below), default=-1)
    users: dict[str, set[str]] = {name: set() for name in uses}
    for name, below in uses.items():
        for other in below:
            users[other].add(name)
    for name in reversed(uses):  # a box with more arrows up than down is drawn up
        if len(users[name]) > len(uses[name]):
            layer[name] = min(layer[user] for user in users[name]) - 1
    return layer


def svg(uses: Mapping[str, set[str]], title: str) -> str:
    """Return the picture of a graph without circles.

    Args:
        uses: what each box uses, with those that are used before those that use them.
        title: what the picture shows, for those who hear it read.
    """
    layer = layers_of(uses)
    rows, links = _rows(uses, layer)
    _untangle(rows, links)
    x = _columns(rows, links)
    left = min(x[spot] - _width(spot) / 2 for row in rows for spot in row)
    right = max(x[spot] + _width(spot) / 2 for row in rows for spot in row)
    width, height = right - left + 2 * _MARGIN, (len(rows) - 1) * _ROW + _HEIGHT + 2 * _MARGIN

    def place(spot: _Spot) -> tuple[float, float]:
        return x[spot] - left + _MARGIN, height - _MARGIN - _HEIGHT / 2 - spot.layer * _ROW

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>\n{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0.5 L8 4 L0 7.5 z"/></marker></defs>',
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
    ]
    lines += [_arrow([place(spot) for spot in path]) for path in _paths(uses, layer)]
    for name in uses:
        across, down = place(_Spot(name, layer[name]))
        wide = _width(_Spot(name, 0))
        lines.append(
            f'<rect class="box" x="{across - wide / 2:.1f}" y="{down - _HEIGHT / 2:.1f}" width="{wide}" '
            f'height="{_HEIGHT}" rx="6"/><text x="{across:.1f}" y="{down + 4.5:.1f}">{name}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _paths(uses: Mapping[str, set[str]], layer: Mapping[str, int]) -> Iterable[list[_Spot]]:
    """Yield each arrow's places, from the box that is used to the one that uses it."""
    for name, below in uses.items():
        for other in sorted(below, key=list(uses).index):
            bends = [_Spot(f"{other} {name}", level) for level in range(layer[other] + 1, layer[name])]
            yield [_Spot(other, layer[other]), *bends, _Spot(name, layer[name])]


def _rows(
    uses: Mapping[str, set[str]], layer: Mapping[str, int]
) -> tuple[list[list[_Spot]], dict[_Spot, list[list[_Spot]]]]:
    """Return the places of each layer, and each place's neighbours in the layer below it and in the one above."""
    rows: list[list[_Spot]] = [[] for _ in range(max(layer.values()) + 1)]
    links: dict[_Spot, list[list[_Spot]]] = {}
    for name in uses:
        links[_Spot(name, layer[name])] = [[], []]
        rows[layer[name]].append(_Spot(name, layer[name]))
    for path in _paths(uses, layer):
        for spot in path[1:-1]:
            links[spot] = [[], []]
            rows[spot.layer].append(spot)
        for below, above in itertools.pairwise(path):
            links[below][1].append(above)
            links[above][0].append(below)
    return rows, links


def _untangle(rows: list[list[_Spot]], links: Mapping[_Spot, list[list[_Spot]]]) -> None:
    """Order each layer so that few arrows cross: by the middle of the neighbours, up and down in turns."""
    best, fewest = [list(row) for row in rows], _crossings(rows, links)
    for sweep in range(_SWEEPS):
        up = sweep % 2 == 0
        for row in rows[1:] if up else rows[-2::-1]:
            beside = rows[row[0].layer + (-1 if up else 1)]
            at = {spot: number / max(len(beside) - 1, 1) for number, spot in enumerate(beside)}
            now = {spot: number / max(len(row) - 1, 1) for number, spot in enumerate(row)}
            middle = {}
            for spot in row:
                near = [at[other] for other in links[spot][0 if up else 1]]
                middle[spot] = sum(near) / len(near) if near else now[spot]
            row.sort(key=middle.__getitem__)
        found = _crossings(rows, links)
        if found < fewest:
            best, fewest = [list(row) for row in rows], found
    rows[:] = best


def _crossings(rows: list[list[_Spot]], links: Mapping[_Spot, list[list[_Spot]]]) -> int:
    """Count the crossings of arrows between neighbouring layers."""
    count = 0
    for row, above in itertools.pairwise(rows):
        at = {spot: number for number, spot in enumerate(above)}
        ends = [at[other] for spot in row for other in sorted(links[spot][1], key=at.__getitem__)]
        count += sum(early > late for number, early in enumerate(ends) for late in ends[number + 1 :])
    return count


def _columns(rows: list[list[_Spot]], links: Mapping[_Spot, list[list[_Spot]]]) -> dict[_Spot, float]:
    """Return how far right each place is: in the middle of its neighbours, as far as its layer leaves room."""
    x: dict[_Spot, float] = {}
    for row in rows:
        whole = sum(_width(spot) + _GAP for spot in row)
        at = -whole / 2
        for spot in row:
            x[spot] = at + (_width(spot) + _GAP) / 2
            at += _width(spot) + _GAP
    for sweep in range(4 * _SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            near = {spot: [x[other] for side in links[spot] for other in side] or [x[spot]] for spot in row}
            _make_room(row, {spot: sum(near[spot]) / len(near[spot]) for spot in row}, x)
    return x


def _make_room(row: list[_Spot], wish: Mapping[_Spot, float], x: dict[_Spot, float]) -> None:
    """Place a layer as near to what its places wish as their order and widths allow, by pooling those too near."""
    pools: list[tuple[list[_Spot], float]] = []  # places that touch, and where the first of them stands
    for spot in row:
        group, start = [spot], wish[spot]
        while pools and start < pools[-1][1] + _spread(pools[-1][0], group[0]):
            group = pools.pop()[0] + group
            offsets = [_spread(group[:number], group[number]) if number else 0.0 for number in range(len(group))]
            start = sum(wish[each] - offset for each, offset in zip(group, offsets, strict=True)) / len(group)
        pools.append((group, start))
    for group, start in pools:
        for number, spot in enumerate(group):
            x[spot] = start + (_spread(group[:number], spot) if number else 0.0)


def _spread(group: list[_Spot], then: _Spot) -> float:
    """Return how far a place stands from the first of a group that it follows."""
    line = [*group, then]
    return sum((_width(a) + _width(b)) / 2 + _GAP for a, b in itertools.pairwise(line))


def _width(spot: _Spot) -> int:
    """Return the width of a box by its name; that of a bend is nothing."""
    return 0 if " " in spot.name else 8 * len(spot.name) + 20


def _arrow(points: list[tuple[float, float]]) -> str:
    """Return a curve through some points, from the upper edge of a box to the lower edge of another."""
    (x, y), (end_x, end_y) = points[0], points[-1]
    through = [(x, y - _HEIGHT / 2), *points[1:-1], (end_x, end_y + _HEIGHT / 2 + 1)]
    slopes = [0.0] * len(through)  # sideways for each pixel up: none at the boxes, between them that of both sides
    for number in range(1, len(through) - 1):
        (from_x, from_y), (to_x, to_y) = through[number - 1], through[number + 1]
        slopes[number] = (to_x - from_x) / (to_y - from_y)
    drawn = f"M{through[0][0]:.1f} {through[0][1]:.1f}"
    for (a, b), (slope_a, slope_b) in zip(itertools.pairwise(through), itertools.pairwise(slopes), strict=True):
        reach = (b[1] - a[1]) * (1 / 2 if len(through) == 2 else 1 / 3)
        drawn += f" C{a[0] + slope_a * reach:.1f} {a[1] + reach:.1f} {b[0] - slope_b * reach:.1f} {b[1] - reach:.1f}"
        drawn += f" {b[0]:.1f} {b[1]:.1f}"
    return f'<path class="arrow" d="{drawn}" marker-end="url(#tip)"/>'
