"""Draw the pictures of the page "Measured", all in one style, from benchmarks/figures.json.

    python benchmarks/draw.py                   # all of them, into docs/pictures
    python benchmarks/draw.py launch data       # these alone

The figures are written there as the page's tables have them, with their units and words. Needs matplotlib.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, transforms
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
FIGURES = Path(__file__).with_name("figures.json")
PICTURES = ROOT / "docs" / "pictures"
HANGS = 40.0  # seconds after which a run was ended
LEAST = 0.5  # where a rounded 0 stands on a logarithmic axis

# Colours that colour-blind people can tell apart, by Okabe and Ito, https://jfly.uni-koeln.de/color, each with its like
# on a dark page. One library has one colour on all pictures; the first word of a name decides.
COLOURS = {
    "distwrap": ("#0072b2", "#4aa8e0"),
    "torch": ("#e69f00", "#e9a820"),
    "Fabric": ("#009e73", "#1fb58b"),
    "Accelerate": ("#b4648f", "#d48fb4"),
    "torchrunx": ("#7a8794", "#9aa7b4"),
    "DeepSpeed": ("#009e74", "#1fb58c"),
    "Horovod": ("#d55e00", "#e8813a"),
}
LIKE = {
    "torchrun": "torch",
    "from": "torch",
    "polling": "torch",
    "put": "torch",
    "found": "distwrap",
    "10": "Horovod",
    "100": "torch",
    "1000": "distwrap",
    "unshaped": "torchrunx",
}
INK, MUTED, PAPER = ("#1d2733", "#e4e9ef"), ("#b9c1ca", "#454d57"), ("#ffffff", "#17191d")
MARKERS = {"distwrap": "o", "torch": "s", "Fabric": "^", "Accelerate": "D", "torchrunx": "v", "Horovod": "P"}

pyplot.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 11,
        "svg.fonttype": "none",  # letters stay letters: small files, and text that can be found
        "svg.hashsalt": "distwrap",
        "text.color": INK[0],
        "axes.labelcolor": INK[0],
        "xtick.color": INK[0],
        "ytick.color": INK[0],
        "axes.edgecolor": MUTED[0],
        "grid.color": MUTED[0],
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "figure.facecolor": PAPER[0],
        "axes.facecolor": PAPER[0],
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
    }
)


def number(text: str) -> float:
    """Return the number in a figure as it is written; milliseconds count as seconds beside seconds."""
    if text.startswith("hangs"):
        return HANGS
    found = re.match(r"[+-]?[\d.]+", text)
    assert found, text
    return float(found[0])


def seconds(text: str) -> float:
    """Return a time in seconds."""
    return number(text) / (1000 if text.endswith(" ms") else 1)


def colour(name: str) -> str:
    """Return the colour of what is compared."""
    return COLOURS[_library(name)][0]


def _library(name: str) -> str:
    word = re.split(r"[ ,.]", name)[0]
    return LIKE.get(word, word)


def series_of(rows: dict[str, dict[str, str]]) -> list[str]:
    """Return what is compared, in the order in which it comes up."""
    return list(dict.fromkeys(name for row in rows.values() for name in row))


def hatches_of(panels: list[dict[str, Any]]) -> dict[str, str]:
    """Return a pattern for each name, which tells names of one library apart, as they have one colour."""
    names = dict.fromkeys(name for panel in panels for name in series_of(panel["rows"]))
    like = {name: [other for other in names if _library(other) == _library(name)] for name in names}
    return {name: ("", "///", "xxx")[others.index(name)] for name, others in like.items()}


def draw_bars(axes: Axes, panel: dict[str, Any], scale: str, hatches: dict[str, str]) -> None:
    """Draw a group of bars for each row, each bar with its figure at its end."""
    position, ticks = 0.0, []
    named: set[str] = set()
    lowest = min(seconds(text) for row in panel["rows"].values() for text in row.values())
    floor = 10.0 ** math.floor(math.log10(lowest)) if scale == "log" else 0.0
    for row in panel["rows"].values():
        ticks.append(position + (len(row) - 1) / 2)
        for name, text in row.items():
            value = seconds(text)
            label = name if name not in named else None
            named.add(name)
            look = {"color": colour(name), "label": label, "hatch": hatches[name], "ec": PAPER[0]}
            axes.barh(position, value - floor, 0.86, left=floor, **look)
            end = (max(value, floor), position)
            axes.annotate(text, end, (4, 0), textcoords="offset points", va="center", fontsize=10)
            position += 1
        position += 0.7
    axes.set_yticks(ticks, list(panel["rows"]))
    axes.set_ylim(position - 0.9, -0.8)
    axes.set_xscale(scale)
    axes.margins(x=0.12)
    if scale == "log":
        axes.set_xlim(left=floor)
    axes.axvline(floor, color=INK[0], linewidth=0.8)
    axes.grid(axis="x")


def draw_dots(axes: Axes, panel: dict[str, Any], scale: str, _: dict[str, str]) -> None:
    """Draw a line for each row with a mark for what is compared; hollow where the answer was not whole."""
    rows = panel["rows"]
    names = series_of(rows)
    for line, row in enumerate(rows.values()):
        values = [number(text) for text in row.values()]
        axes.plot([min(values), max(values)], [line, line], color=MUTED[0], linewidth=1, zorder=1)
    for place, name in enumerate(names):
        shift = (place - (len(names) - 1) / 2) * 0.12
        whole = [(number(row[name]), line + shift) for line, row in enumerate(rows.values()) if is_whole(row[name])]
        rest = [(number(row[name]), line + shift) for line, row in enumerate(rows.values()) if not is_whole(row[name])]
        look = {"marker": MARKERS[_library(name)], "s": 46, "edgecolors": colour(name), "linewidths": 1.4, "zorder": 3}
        axes.scatter(*zip(*whole, strict=True), color=colour(name), label=name, **look)
        if rest:
            axes.scatter(*zip(*rest, strict=True), facecolors=PAPER[0], **look)
    if any("hangs" in text for row in rows.values() for text in row.values()):
        axes.axvline(HANGS, color=MUTED[0], linestyle=":")
        axes.text(HANGS, -0.75, "hangs", ha="center", fontsize=10)
        axes.scatter(
            [], [], facecolors=PAPER[0], edgecolors=INK[0], s=46, label="hollow: no cause named, or processes left"
        )
    if "line" in panel:
        axes.axvline(panel["line"]["at"], color=INK[0], linewidth=0.8)
        axes.text(panel["line"]["at"], -0.75, panel["line"]["text"], ha="center", fontsize=10)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale(scale)
    axes.grid(axis="both")


def is_whole(text: str) -> bool:
    """Tell whether a figure has no restriction beside it: a cause that was not named, a process left."""
    return not re.search("no cause|leaves|hangs", text)


def draw_lines(axes: Axes, panel: dict[str, Any], scale: str, _: dict[str, str]) -> None:
    """Draw a line for each of what is compared, over the rows; a rounded 0 stands at a half."""
    rows = panel["rows"]
    at = [eval_power(name) for name in rows]
    for name in series_of(rows):
        points = [(x, max(number(row[name]), LEAST)) for x, row in zip(at, rows.values(), strict=True) if name in row]
        dashed = "--" if "stream" in name else "-"
        look = {"marker": MARKERS[_library(name)], "markersize": 6, "color": colour(name), "linestyle": dashed}
        axes.plot(*zip(*points, strict=True), label=name, **look)
    axes.axhline(panel["goal"], color=INK[0], linestyle=":", linewidth=1)
    axes.annotate("the goal", (at[0], panel["goal"]), (0, 4), textcoords="offset points", fontsize=10)
    axes.set_xscale(scale)
    axes.set_yscale("log")
    axes.set_xticks(at, [f"\n{name}" if "·" in name else name for name in rows])
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.grid(axis="both")


def eval_power(name: str) -> float:
    """Return the number that is written as 10^4 or as 5·10^7."""
    factor, _, power = name.rpartition("·")
    return float(factor or 1) * 10 ** int(power.removeprefix("10^"))


def height_of(panel: dict[str, Any], kind: str) -> float:
    """Return the height of a panel in inches."""
    rows = panel["rows"]
    if kind == "lines":
        return 3.4
    lines = sum(len(row) for row in rows.values()) * 0.26 + len(rows) * 0.18 if kind == "bars" else len(rows) * 0.34
    return lines + 0.5 + 0.25 * (len(series_of(rows)) + 1) // 2


def draw(what: dict[str, Any]) -> str:
    """Return a picture as SVG."""
    panels, kind = what["panels"], what["kind"]
    heights = [height_of(panel, kind) for panel in panels]
    size = (7.6, sum(heights) + 0.9)
    figure, all_axes = pyplot.subplots(
        len(panels), 1, figsize=size, height_ratios=heights, layout="constrained", squeeze=False
    )
    figure.suptitle(what["title"], fontsize=12, fontweight="bold", x=0.01, ha="left", wrap=True)
    for axes, panel in zip(all_axes[:, 0], panels, strict=True):
        {"bars": draw_bars, "dots": draw_dots, "lines": draw_lines}[kind](
            axes, panel, what["scale"], hatches_of(panels)
        )
        axes.set_title(" ", fontsize=10, pad=20 if kind == "dots" else 4)  # room for the line below
        across = transforms.blended_transform_factory(figure.transFigure, axes.transAxes)
        above = transforms.ScaledTranslation(0, (18 if kind == "dots" else 6) / 72, figure.dpi_scale_trans)
        axes.text(0.01, 1, panel["title"], fontsize=10, transform=across + above).set_in_layout(False)
        axes.tick_params(length=0)
        if what["scale"] == "log" and kind != "lines":
            axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    last = all_axes[-1, 0]
    last.set_xlabel(what["axis"], fontsize=10)
    handles = {
        label: handle
        for axes in all_axes[:, 0]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower left", ncols=2 if len(handles) > 1 else 1, fontsize=10
    )
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return in_both_lights(written.getvalue(), what["title"])


def in_both_lights(svg: str, title: str) -> str:
    """Return a picture whose colours follow whether the page is light or dark, and that has a title to be read out."""
    pairs = [*COLOURS.values(), INK, MUTED, PAPER]
    for number, (light, _) in enumerate(pairs):
        svg = re.sub(rf'(fill|stroke)="{light}"', rf'style="\1: {light}"', svg)  # of the patterns
        svg = re.sub(rf"(fill|stroke): ?{light}\b", rf"\1: var(--c{number}, {light})", svg)
    dark = "; ".join(f"--c{number}: {dark}" for number, (_, dark) in enumerate(pairs))
    light = "; ".join(f"--c{number}: {light}" for number, (light, _) in enumerate(pairs))
    style = f"<style>svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    svg = re.sub(r"font: (.*?)'DejaVu Sans'", r"font: \1'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif", svg)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"(<svg[^>]*>)", rf"\1\n <title>{title}</title>\n {style}", svg, count=1)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    """Write the pictures that the command line names, or all."""
    figures = json.loads(FIGURES.read_text())
    PICTURES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or figures:
        (PICTURES / f"{name}.svg").write_text(draw(figures[name]))


if __name__ == "__main__":
    main()
