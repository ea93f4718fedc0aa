"""Time for which saving one gigabyte keeps training waiting: torch.save, distwrap.save, and it in the background.

One process, in turns, into the folder for temporary files. Between two saves in the background nothing else is saved,
as in training; the first one also takes the memory for its copy, and is a row of its own.

    python benchmarks/checkpoint.py [--quick] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from command_line import arguments, compare
from samples import Samples, in_turns
from table import Row, report

from distwrap import save, wait_for_saves

MEGABYTE = 2**20


def main() -> None:
    args = arguments(__doc__)
    if args.against:
        compare(__file__, args)
        return
    megabytes, rounds = (16, 3) if args.short else (1024, 7)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), megabytes, rounds)
    report(f"checkpoint: {megabytes} MB of weights on the CPU, one process", rows, [], args)


def measure(folder: Path, megabytes: int, rounds: int) -> list[Row]:
    state = {f"layer{number}.weight": torch.randn(MEGABYTE) for number in range(megabytes // 4)}
    first = in_background(state, folder)()
    ways: dict[str, Callable[[], float]] = {
        "torch.save": timed(lambda: torch.save(state, folder / "torch.pt")),
        "save": timed(lambda: save(state, folder / "ours.pt")),
        "background": in_background(state, folder),
    }
    taken = in_turns(ways, rounds)
    theirs, ours, background = taken["torch.save"], taken["save"], taken["background"]
    share = background.over(theirs)
    return [
        Row(
            "blocking time: save(background=True), torch.save",
            background,
            theirs,
            "ms",
            f"{100 * share:.1f} %",
            "<= 10 %",
            share <= 0.1,
        ),
        Row(
            "the first one: save(background=True), torch.save",
            Samples([first]),
            theirs,
            "ms",
            f"{100 * first / theirs.median:.1f} %",
        ),
        Row("whole: save (with fsync), torch.save", ours, theirs, "ms", f"{ours.over(theirs):.2f} times"),
    ]


def timed(body: Callable[[], object]) -> Callable[[], float]:
    def way() -> float:
        start = time.perf_counter()
        body()
        return time.perf_counter() - start

    return way


def in_background(state: dict[str, torch.Tensor], folder: Path) -> Callable[[], float]:
    """Time the call alone, and then wait until the file is written, as the work of the next step would."""

    def way() -> float:
        start = time.perf_counter()
        save(state, folder / "background.pt", background=True)
        blocked = time.perf_counter() - start
        wait_for_saves()
        return blocked

    return way


if __name__ == "__main__":
    main()
