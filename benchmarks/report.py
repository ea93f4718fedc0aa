"""What a report costs and how right its sums are; torch's profiler beside it, and `top` on a run of 16 ranks.

The cost is that of a step of about 5 ms, in turns in one run: as it is, with a report, and under torch's profiler with
its default schedule, which records each step. Then what the parts add up to beside the clock, and the step of one rank
alone, as predicted from two and as measured.

    python benchmarks/report.py [--quick] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from command_line import arguments
from samples import Samples, in_turns
from slow_loops import ROOT, measured, plain, slow_forward_on_one
from table import Row, report
from torch import nn
from torch.profiler import profile

import distwrap as dw

WIDTH, BATCH, CALLS = 256, 512, 10
TOP_TRAIN = """
import sys, time
import torch
import distwrap as dw

@dw.distributed(nprocs=int(sys.argv[1]))
def main():
    model = dw.wrap_model(torch.nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 10, generator=dw.rank_generator(0))
    until, steps, times = time.monotonic() + float(sys.argv[2]), 0, []
    while dw.agree(time.monotonic() < until, "all"):
        began = time.perf_counter()
        model(x).sum().backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
        time.sleep(0.2)
    return sorted(times)[len(times) // 2]

print(main())
"""


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


def top(ranks: int, seconds: float, imports: float = 5) -> list[Row]:
    """Return the rows of the processor time of `top` on a run of so many ranks, and of a step of the run beside it.

    Args:
        ranks: of the run.
        seconds: for which `top` is looked at.
        imports: seconds that its own imports are given.
    """
    used, taken = [], {}
    for looked_at in (False, True):
        with TemporaryDirectory() as folder:
            script = Path(folder, "train.py")
            script.write_text(TOP_TRAIN)
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            run = subprocess.Popen(
                [sys.executable, script, str(ranks), str(seconds + ranks + imports)],
                env=env,
                stdout=subprocess.PIPE,
                text=True,
            )
            looking = None
            if looked_at:
                time.sleep(ranks)  # until all have come
                command = [sys.executable, "-m", "distwrap", "top", str(run.pid)]
                looking = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
                time.sleep(imports)
                began = _processor(looking.pid)
                time.sleep(seconds)
                used.append((_processor(looking.pid) - began) / seconds)
            taken[looked_at] = Samples([float(run.communicate(timeout=300)[0])])
            if looking is not None:
                looking.kill()
                looking.wait()
    what = f"processor of `top` on {ranks} ranks, of a core"
    return [
        Row(what, Samples(used), None, "s", f"{100 * used[0]:.2f} %", "< 2 %", used[0] < 0.02),
        Row(
            "step of a run under `top`, without",
            taken[True],
            taken[False],
            "ms",
            f"{taken[True].over(taken[False]):.2f} times",
        ),
    ]


def _processor(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    os.environ["DISTWRAP_QUIET"] = "1"
    args = arguments(__doc__)
    steps = 50
    if args.quick:
        steps = 3
        torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports torch's compiler, which each forked rank would do else
    rows = [
        sums(steps),
        alone(steps, 1 if args.quick else 9),
        *cost_rows(2 if args.quick else 500),
        *(top(2, 0.5, imports=1.5) if args.quick else top(16, 20)),
    ]
    report("the report: 2 ranks, gloo", rows, [], args)


if __name__ == "__main__":
    main()
