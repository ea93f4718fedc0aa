"""A picture of a report: a bar for each rank, with what its time went to, and the waiting for others in red."""

from __future__ import annotations

from typing import Any

_COLOURS = {
    "data": "tab:orange",
    "forward": "tab:blue",
    "backward": "tab:cyan",
    "exchange": "tab:gray",
    "waiting": "tab:red",
    "optimizer": "tab:green",
    "checkpoint": "tab:brown",
    "evaluation": "tab:purple",
    "own": "tab:olive",
}
_NAMES = {"own": "own code", "waiting": "waiting for other ranks", "exchange": "the exchange itself"}
_MOST_BARS = 64


def draw(figures: dict[str, Any], path: str) -> None:
    """Draw a report's figures.

    Args:
        figures: those of `Report.figures`.
        path: of the picture, whose suffix says what it is.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: matplotlib draws no file with this suffix.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = figures["ranks"][:_MOST_BARS]
    figure, axes = pyplot.subplots(figsize=(10, 1.8 + 0.35 * len(ranks)), layout="constrained")
    left = [0.0] * len(ranks)
    for part, colour in _COLOURS.items():
        widths = [1e3 * _seconds(rank["parts"], part, figures["link"]) for rank in ranks]
        if max(widths) > 0.001 * 1e3 * figures["step"]:
            axes.barh(range(len(ranks)), widths, left=left, color=colour, label=_NAMES.get(part, part))
            left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(ranks)), [f"rank {rank['rank']}, {rank['host']}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step")
    title = f"{figures['steps']} steps on {len(figures['ranks'])} rank(s)"
    if len(figures["ranks"]) > 1:
        title += f": {figures['speedup']:.1f} times as fast as one alone"
    axes.set_title(title)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _seconds(parts: dict[str, float], part: str, link: float) -> float:
    """Return the seconds in a rank's bar; its exchange is divided into the exchange itself and the wait for others."""
    if part == "exchange":
        return min(parts["exchange"], link)
    if part == "waiting":
        return max(0.0, parts["exchange"] - link)
    return parts[part]
