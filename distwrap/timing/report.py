"""The report of where the time of a run goes: a table of one screen, and all figures as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distwrap.errors import OptionError
from distwrap.group.world import current_world, is_rank_zero
from distwrap.stopwatch import Part
from distwrap.timing.advice import Suggestion, advise
from distwrap.timing.analysis import analysed
from distwrap.timing.recorder import Measuring, RankTimes
from distwrap.wording import as_memory, as_size, print_notice

_NOT_TOLD = ("total", "kept")  # figures of a rank, of which only the mean is told, as its parts
_MOST_ROWS = 16  # of a table; of more ranks those are shown that differ most


class Report:
    """Report of where the time of a run goes; empty until the ``with`` has ended, and then the same on every rank.

    Attributes:
        advice: the changes that are worth making, the most worthwhile first.
        figures: all figures, in plain lists and dicts; seconds are of a step.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with report() as found:
        ...     for _ in range(3):
        ...         model(torch.ones(1, 1)).sum().backward()
        ...         optimizer.step()
        >>> found.figures["steps"], sorted(found.figures["parts"])[:3]
        (2, ['backward', 'checkpoint', 'data'])
    """

    def __init__(self) -> None:
        self.advice: list[Suggestion] = []
        self.figures: dict[str, Any] = {}
        self._has_ended = False

    def fill(self, ranks: list[RankTimes]) -> None:
        """Take what all ranks have measured."""
        self._has_ended = True
        if not all(rank.steps for rank in ranks):
            return
        found = analysed(ranks)
        self.advice = advise(found)
        self.figures = {
            "step": found.step,
            "steps": found.steps,
            "samples_per_second": found.samples_a_second,
            "alone": found.alone,
            "speedup": found.speedup,
            "efficiency": found.efficiency,
            "parts": _by_name(found.parts),
            "link": found.link,
            "waiting": found.waiting,
            "lags": [{**asdict(lag), "part": lag.part.name.lower()} for lag in found.lags],
            "advice": [asdict(piece) for piece in self.advice],
            "ranks": [
                {**{k: v for k, v in asdict(rank).items() if k not in _NOT_TOLD}, "parts": _by_name(rank.mean())}
                for rank in ranks
            ],
        }

    def text(self) -> str:
        """Return the report in words."""
        if not self._has_ended:
            return (
                "distwrap report: it is empty until its `with` block has ended without an error. Look at it "
                "after the block."
            )
        return describe(self.figures)

    __str__ = text


def _by_name(row: list[float]) -> dict[str, float]:
    return {part.name.lower(): seconds for part, seconds in zip(Part, row, strict=True)}


def describe(figures: dict[str, Any]) -> str:
    """Return a report's figures as a table and sentences, or a sentence that there are none."""
    if figures == {}:
        return (
            "distwrap report: no step was measured. A step goes from one optimizer.step() to the next, so "
            "every rank's loop must call it at least twice, in the thread that began the report."
        )
    ranks, step, advice = figures["ranks"], figures["step"], figures["advice"]
    size = max(rank["gradient_bytes"] for rank in ranks)
    lines = [
        f"distwrap report: {figures['steps']} steps of {1e3 * step:.1f} ms on {len(ranks)} rank(s), "
        f"{figures['samples_per_second']:.0f} samples a second, {as_size(size)} of gradients a step"
    ]
    if len(ranks) > 1:
        link, waiting = (100 * figures[name] / step for name in ("link", "waiting"))
        lines += [
            f"  {figures['speedup']:.1f} times as fast as one rank alone, whose step would take "
            f"{1e3 * figures['alone']:.1f} ms: {100 * figures['efficiency']:.0f} % of what {len(ranks)} ranks could do",
            f"  exchange: {link:.0f} % of a step for the exchange itself, and {waiting:.0f} % waiting for other ranks",
        ]
    head = (
        "What to change, and how much of a step it saves at most"
        if advice
        else "There is nothing to change: all is well."
    )
    texts = [f"  {100 * piece['gain']:3.0f} %  {piece['text']}" for piece in advice]
    return "\n".join([*lines, "", *_table(ranks), "", head, *texts])


def _table(ranks: list[dict[str, Any]]) -> list[str]:
    used = [part for part in ranks[0]["parts"] if any(rank["parts"][part] for rank in ranks)]
    rows = [["rank", "host", "device", *("own code" if part == "own" else part for part in used), "memory"]]
    for rank in _shown(ranks):
        whole = sum(rank["parts"].values())
        memory = as_memory(rank["process_memory"], rank["device_memory"])
        shares = [f"{100 * rank['parts'][part] / whole:.0f} %" for part in used]
        rows.append([str(rank["rank"]), rank["host"], rank["device"], *shares, memory])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _shown(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ranks to show; of many, those that waited least and most for the others."""
    if len(ranks) <= _MOST_ROWS:
        return ranks
    by_wait = sorted(ranks, key=lambda rank: rank["parts"]["exchange"])
    half = _MOST_ROWS // 2
    return sorted(by_wait[:half] + by_wait[-half:], key=lambda rank: rank["rank"])


@contextmanager
def report() -> Iterator[Report]:
    """Measure where the time goes within a ``with``, on all ranks; every rank must enter and leave it.

    A call without ``with`` measures nothing.

    Yields:
        The report, which is empty until the ``with`` has ended. Then it is printed on rank 0's standard error, also
        with ``DISTWRAP_QUIET=1``, which silences only what nobody has asked for.

    Raises:
        OptionError: a report is being measured already.

    Example:
        >>> with report() as found:
        ...     pass
        >>> found.figures
        {}
    """
    measuring, found = current_world().part(Measuring), Report()
    if measuring.has_report:
        raise OptionError("report(): the run is measured already, by @distributed(report=…) or by an outer report().")
    with measuring.report() as measured:
        yield found
        found.fill(measured())
    if is_rank_zero():
        print(found.text(), file=sys.stderr, flush=True)


@contextmanager
def report_of_run(asked: bool | str) -> Iterator[None]:
    """Measure a whole run within a ``with``, if its options ask for it; every rank enters and leaves it.

    Args:
        asked: whether to measure it; or the path of a file for the figures. If it cannot be written, a line says so.
    """
    if not asked:
        yield
        return
    with report() as found:
        yield
    if isinstance(asked, str) and is_rank_zero():
        try:
            Path(asked).write_text(json.dumps(found.figures, indent=1) + "\n")
        except OSError as error:
            print_notice(f"the report cannot be written: {error}")
