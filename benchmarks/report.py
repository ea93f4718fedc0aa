"""What a report costs and how right its sums are; torch's profiler beside it.

The cost is that of a step of about 5 ms, in turns in one run: as it is, with a report, and under torch's profiler with
its default schedule, which records each step. Then what the parts add up to beside the clock, and the step of one rank
alone, as predicted from two and as measured.

    python benchmarks/report.py [--quick] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from command_line import arguments
from samples import Samples, in_turns
from slow_loops import measured, plain, slow_forward_on_one
from table import Row, report
from torch import nn
from torch.profiler import profile

import distwrap as dw

WIDTH, BATCH, CALLS = 256, 512, 10


@dw.distributed(nprocs=2)
def costs(rounds: int) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """Time a step of about 5 ms, by the clock and by the processor time of its thread, in three ways."""
    torch.set_num_threads(1)
    model = dw.wrap_model(nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, WIDTH, generator=dw.rank_generator(0))

    used: dict[str, list[float]] = {"plain": [], "report": [], "profiler": []}

    def steps(way: str, after: Callable[[], object] = lambda: None) -> float:
        began, began_thread = time.perf_counter(), time.thread_time()
        for _ in range(CALLS):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after()
        used[way].append((time.thread_time() - began_thread) / CALLS)
        return (time.perf_counter() - began) / CALLS

    def plain_steps() -> float:
        return steps("plain")

    def reported() -> float:
        with dw.report():
            steps("report")  # its first step places what is placed once
            used["report"].pop()
            return steps("report")

    def profiled() -> float:
        with profile() as profiler:
            return steps("profiler", profiler.step)

    in_turns({"plain": plain_steps}, 6)  # until what looks at the first steps is gone
    used["plain"].clear()
    taken = in_turns({"plain": plain_steps, "report": reported, "profiler": profiled}, rounds)
    return taken, {way: Samples(seconds) for way, seconds in used.items()}


def cost_rows(rounds: int) -> list[Row]:
    """Return the rows of a step with a report, and under torch's profiler."""
    taken, used = costs(rounds)
    rows = []
    for way, goal in (("report", 1.01), ("profiler", None)):
        ratio = taken[way].over(taken["plain"])
        words = (f"<= {goal} times", ratio <= goal) if goal is not None else ("", None)
        figure = f"{ratio:.4f} times"
        rows.append(Row(f"step with {way}, without", taken[way], taken["plain"], "ms", figure, *words))
        more = used[way].above(used["plain"])
        what = f"processor time of its thread with {way}, without"
        rows.append(Row(what, used[way], used["plain"], "ms", f"+{1e6 * more:.0f} us"))
    return rows


def sums(steps: int) -> Row:
    """Return the row of what the parts add up to, beside the time of a step by the clock."""
    found, seconds, _ = measured(slow_forward_on_one, steps)
    ratio = found["step"] / seconds
    ours, clock = Samples([found["step"]]), Samples([seconds])
    met = abs(ratio - 1) <= 0.02
    return Row("parts of a step added up, by the clock", ours, clock, "ms", f"{ratio:.4f} times", "within 2 %", met)


def alone(steps: int, rounds: int) -> Row:
    """Return the row of the step of one rank alone, as predicted from two, and as measured."""
    predicted, taken = [], []
    for _ in range(rounds):
        predicted.append(measured(plain, steps)[0]["alone"])
        taken.append(measured.options(nprocs=1)(plain, steps)[1])
    ours, theirs = Samples(predicted), Samples(taken)
    ratio = ours.over(theirs)
    what = "step of one rank alone: predicted from two, measured"
    return Row(what, ours, theirs, "ms", f"{ratio:.3f} times", "within 10 %", abs(ratio - 1) <= 0.1)


def main() -> None:
    os.environ["DISTWRAP_QUIET"] = "1"
    args = arguments(__doc__)
    steps = 50
    if args.quick:
        steps = 3
        torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports torch's compiler, which each forked rank would do else
    rows = [sums(steps), alone(steps, 1 if args.quick else 9), *cost_rows(2 if args.quick else 500)]
    report("the report: 2 ranks, gloo", rows, [], args)


if __name__ == "__main__":
    main()
