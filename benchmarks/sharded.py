"""Memory a rank and time a step of divided models, beside hand-written torch and Accelerate.

A model of 97.9 million parameters, AdamW, float32, on the CPU over gloo, on 2 and 4 ranks. Two ways at a time are
alive, and take their steps in turns. Memory is that of a process above what it took before the model was made.
Accelerate leaves its FSDP out on the CPU and trains DDP, without a word; its line shows it, and its steps are not
compared, nor are those of ways that train one batch on all ranks: of tensor parallelism and pipelines.

    python benchmarks/sharded.py [--quick] [--json FILE] [--plot FILE.png]     # twenty minutes, 18 GB of memory
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from importlib.util import find_spec
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from ports import free_port
from sharded_ranks import SIZES, WAYS
from timing import Row, Samples, arguments, compare, in_turns, report

MEGABYTE = 2**20
LIMIT = 300.0  # seconds for an answer
PAIRS: dict[tuple[str, str], float | None] = {  # and the goal of the first one's step over the second one's
    ("distwrap ddp", "torch ddp"): None,
    ("distwrap zero1", "torch zero"): None,
    ("distwrap zero2", "torch zero"): None,
    ("distwrap fsdp", "torch fsdp2"): 1.02,
    ("distwrap zero1", "distwrap ddp"): 1.05,
}
Memory = dict[str, int]  # what of, and how many bytes


class Ranks:
    """Processes of one way, which wait to be asked."""

    def __init__(self, way: str, ranks: int, size: str) -> None:
        self._way, self._processes, self._conns = way, [], []
        port = free_port()
        for rank in range(ranks):
            ours, theirs = Pipe()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "DISTWRAP_QUIET": 1}
            env = {**os.environ, **{name: str(value) for name, value in (place | meeting).items()}}
            command = [sys.executable, str(Path(__file__).with_name("sharded_ranks.py")), way, size]
            self._processes.append(
                subprocess.Popen([*command, str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=env)
            )
            theirs.close()
            self._conns.append(ours)

    def wait(self) -> None:
        """Wait until all have come."""
        self._answers()

    def ask(self, what: str) -> list[Any]:
        """Return the answer of each rank."""
        for conn in self._conns:
            conn.send(what)
        return self._answers()

    def step(self) -> float:
        """Return the seconds of the slowest rank."""
        return float(max(self.ask("step")))

    def close(self) -> None:
        for conn in self._conns:
            with suppress(BrokenPipeError):
                conn.send("end")
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _answers(self) -> list[Any]:
        return [self._answer(rank) for rank in range(len(self._conns))]

    def _answer(self, rank: int) -> Any:
        try:
            if self._conns[rank].poll(LIMIT):
                return self._conns[rank].recv()
            problem = f"has not answered in {LIMIT:g} s"
        except EOFError:
            problem = f"has ended with {self._processes[rank].wait(10)}"
        for process in self._processes:
            process.kill()
        raise RuntimeError(f"{self._way}: rank {rank} {problem}; what it printed is above")


def main() -> None:
    args = arguments(__doc__)
    if args.against:
        compare(__file__, args)
        return
    size, counts, rounds = ("quick", (2,), 3) if args.quick else ("full", (2, 4), 15)
    plot, args.plot = args.plot, None
    rows: list[Row] = []
    figures: dict[int, dict[str, list[Memory]]] = {}
    notes = []
    for ranks in counts:
        figures[ranks], more = measure(ranks, size, rounds)
        rows += more
        notes.append(memory_of(figures[ranks], ranks, size))
    if not find_spec("accelerate"):
        notes.append("accelerate fsdp2: not installed")
    report("sharded: a step of AdamW, and memory a rank", rows, notes, args)
    if plot:
        draw(figures, plot)


def measure(ranks: int, size: str, rounds: int) -> tuple[dict[str, list[Memory]], list[Row]]:
    """Return the memory of each way, and the rows of their steps; quick ways stay for the next pair."""
    memory: dict[str, list[Memory]] = {}
    rows = []
    with ExitStack() as ends:
        groups: dict[str, Ranks] = {}
        for pair, goal in PAIRS.items():
            new = {way: ends.enter_context(closing(Ranks(way, ranks, size))) for way in pair if way not in groups}
            for group in new.values():
                group.wait()
            groups |= new
            steps: dict[str, Callable[[], float]] = {way: groups[way].step for way in pair}
            ours, theirs = in_turns(steps, rounds).values()
            memory |= {way: memory_after_steps(way, groups[way]) for way in pair if way not in memory}
            rows.append(row(f"{pair[0]}, {pair[1]}, {ranks} ranks", ours, theirs, goal))
            if size != "quick":
                ends.close()
                groups.clear()
    for way in WAYS if size != "quick" else ():
        if way in memory or not (way.startswith("distwrap") or find_spec("accelerate")):
            continue
        with closing(Ranks(way, ranks, size)) as group:
            group.wait()
            for _ in range(rounds):
                group.step()
            memory[way] = memory_after_steps(way, group)
    return {way: memory[way] for way in WAYS if way in memory}, rows


def memory_after_steps(way: str, group: Ranks) -> list[Memory]:
    memory: list[Memory] = group.ask("memory")
    peaks = group.ask("save") if way == "distwrap fsdp" else [0] * len(memory)
    return [each | {"save": peak} for each, peak in zip(memory, peaks, strict=True)]


def row(what: str, ours: Samples, theirs: Samples, goal: float | None) -> Row:
    ratio = ours.over(theirs)
    met = None if goal is None else ratio <= goal
    return Row(f"step: {what}", ours, theirs, "ms", f"{ratio:.3f} times", "" if goal is None else f"<= {goal}", met)


def memory_of(memory: dict[str, list[Memory]], ranks: int, size: str) -> str:
    """Return a line a way: the most that a rank takes, in megabytes."""
    width, blocks, words = SIZES[size]
    share = 16 * (blocks * (12 * width**2 + 13 * width) + (words + 2) * width) / ranks / MEGABYTE
    largest = 4 * width * max(words, 4 * width) / MEGABYTE
    lines = [f"memory a rank on {ranks} ranks, in MB; 16 bytes a parameter / ranks are {share:.0f}, the goal of fsdp"]
    lines[0] += f" 1.15 times that, of a full checkpoint two tensors more: {2 * largest:.0f}"
    for way, each in memory.items():
        most = {name: max(rank[name] for rank in each) / MEGABYTE for name in each[0]}
        line = f"  {way:17} weights, gradients, state {most['held']:5.0f} ({most['held'] / share:.2f}); "
        line += f"steady {most['steady']:5.0f}, peak {most['peak']:5.0f}"
        lines.append(line + (f"; a full checkpoint {most['save']:.0f} more" if most["save"] else ""))
    return "\n".join(lines)


def draw(figures: dict[int, dict[str, list[Memory]]], path: str) -> None:
    """Draw the memory of a rank against the number of ranks, a line a way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for way in next(iter(figures.values())):
        heights = [max(rank["peak"] for rank in of_ways[way]) / MEGABYTE for of_ways in figures.values()]
        style = "-" if way.startswith("distwrap") else "--"
        axes.plot(list(figures), heights, style, marker="o", label=way)
    axes.set_xticks(list(figures))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("peak memory of a rank in training, MB above an idle process")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
