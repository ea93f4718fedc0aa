"""Loops that are slow on purpose: what the report finds beside what was put in, and what measuring costs.

Each loop is slow in one way that it times by itself; the report knows nothing of that. Then the cost of a report beside
a step of about 5 ms, and torch's profiler beside it with its default schedule; the step of one rank alone beside what
was predicted from two; and `top` on a run of 16 ranks. The shaped link needs root, iproute2 and the kernel's tbf.

    python benchmarks/slow_loops.py [--quick] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from slow_link import missing, shaped_hosts
from timing import Row, Samples, arguments, in_turns, report
from torch import nn
from torch.profiler import profile
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw

ROOT = Path(__file__).resolve().parent.parent
WIDTH, BATCH = 256, 32
POINTS = 0.03  # by which a share may be off
RANKS_OF_TOP = 16
LENGTHS = [0.002, 0.02]  # seconds of forwards of uneven batches


class Data(TensorDataset):
    """Samples that take a while."""

    seconds = 0.0

    def __getitem__(self, index: int) -> Any:
        if self.seconds:
            time.sleep(self.seconds)
        return super().__getitem__(index)


class Net(nn.Module):
    """A stack of linear layers, before which something may take a while."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))
        self.before = before

    def forward(self, x: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            self.before()
        return self.layers(x)


def busy(seconds: float) -> None:
    """Compute for a while."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


Each = Callable[[int, nn.Module], None]


def train(
    steps: int, before: Callable[[], None] = lambda: None, of_data: float = 0.0, each: Each | None = None
) -> float:
    """Train for some steps; return the seconds of one, of which the first is not counted."""
    data = Data(torch.randn((steps + 1) * BATCH * dw.world_size(), WIDTH))
    data.seconds = of_data / BATCH
    model = dw.wrap_model(Net(before))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    began = ended = 0.0
    for step, (x,) in enumerate(dw.shard_loader(DataLoader(data, batch_size=BATCH))):
        model(x).square().mean().backward()
        optimizer.step()
        ended = time.perf_counter()
        began = began or ended
        optimizer.zero_grad()
        if each is not None and step < steps:
            each(step, model)
    return (ended - began) / steps


def on(rank: int) -> bool:
    """Return whether this is a rank."""
    return dw.rank() == rank


# Ways to be slow; each returns the seconds of a step.


def plain(steps: int) -> float:
    return train(steps)


def slow_loader(steps: int) -> float:
    return train(steps, of_data=0.02)


def slow_loader_on_one(steps: int) -> float:
    return train(steps, of_data=0.02 if on(1) else 0.0)


def slow_forward_on_one(steps: int) -> float:
    return train(steps, before=lambda: busy(0.01) if on(1) else None)


def busy_neighbour(steps: int) -> float:
    """Rank 1 may run on one processor alone, which another program uses too."""
    last = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {last} if on(1) else os.sched_getaffinity(0) - {last})
    command = f"import os; os.sched_setaffinity(0, {{{last}}})\nwhile True: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", command]) if on(1) else None
    try:
        return train(steps)
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()


def evaluation_on_one(steps: int) -> float:
    def evaluate(step: int, model: nn.Module) -> None:
        with torch.no_grad():
            for _ in range(20 if on(0) and step % 10 == 9 else 0):
                model(torch.randn(BATCH, WIDTH))
                time.sleep(0.005)

    return train(steps, each=evaluate)


def checkpoints(steps: int) -> float:
    """500 MB, every 20 steps."""
    with TemporaryDirectory() as folder:
        path, more = dw.broadcast(folder) + "/last.pt", torch.zeros(125_000_000)

        def save(step: int, model: nn.Module) -> None:
            if step % 20 == 19:
                dw.save({"model": model, "more": more}, path)

        taken = train(steps, each=save)
        dw.barrier()
        return taken


def uneven_batches(steps: int) -> float:
    lengths = random.Random(dw.rank())
    return train(steps, before=lambda: time.sleep(lengths.choice(LENGTHS)))


@dw.distributed(nprocs=2)
def measured(loop: Callable[[int], float], steps: int) -> tuple[dict[str, Any], float]:
    """Return the report's figures, and the seconds of a step."""
    with dw.report() as found:
        seconds = loop(steps)
    return found.figures, seconds


def shares(steps: int) -> list[Row]:
    """Return a row for each loop: the share that the report has found, beside what the loop takes longer."""
    rows = []
    for loop, ranks, part in (
        (slow_loader, None, "data"),
        (slow_loader_on_one, [1], "data"),
        (slow_forward_on_one, [1], "forward"),
        (busy_neighbour, [1], ""),
        (evaluation_on_one, [0], "evaluation"),
        (checkpoints, None, "checkpoint"),
    ):
        _, without = measured(plain, steps)
        found, seconds = measured(loop, steps)
        longer = (seconds - without) / seconds
        if ranks is None:
            rows.append(
                _share(
                    loop.__doc__ or loop.__name__, found["parts"][part] / found["step"], longer, f"all: {part}", True
                )
            )
        else:
            rows.append(_lag(loop.__name__, found, longer, ranks, part))
    found, seconds = measured(uneven_batches, steps)
    first, second = (random.Random(rank) for rank in range(2))
    drawn = [(first.choice(LENGTHS), second.choice(LENGTHS)) for _ in range(steps + 1)][1:]
    waited = sum(abs(one - other) for one, other in drawn) / steps / seconds
    rows.append(_lag(uneven_batches.__name__, found, waited, [0, 1], "forward"))
    found, _ = measured(plain, steps)
    rows.append(
        Row(
            "healthy loop: pieces of advice",
            Samples([len(found["advice"])]),
            None,
            "s",
            "; ".join(each["text"] for each in found["advice"]),
            "none",
            not found["advice"],
        )
    )
    return rows


def _lag(what: str, found: dict[str, Any], expected: float, ranks: list[int], part: str) -> Row:
    lag = (found["lags"] or [{"ranks": [], "part": "", "share": 0.0, "takes_turns": False}])[0]
    right = lag["ranks"] == ranks and lag["part"].startswith(part) and lag["takes_turns"] == (len(ranks) > 1)
    turns = " in turns" if lag["takes_turns"] else ""
    return _share(what, lag["share"], expected, f"ranks {lag['ranks']}{turns}: {lag['part']}", right)


def _share(what: str, found: float, expected: float, named: str, right: bool) -> Row:
    """Return the row of a share of a step; the columns hold shares, of which a second is the whole."""
    met = right and abs(found - expected) <= POINTS
    return Row(
        f"{what}: share found, put in", Samples([found]), Samples([expected]), "s", named, f"named, {POINTS} off", met
    )


def shaped_link(steps: int) -> Row | str:
    """Return the row of a link of 100 Mbit/s between hosts; a note where there can be none."""
    if lacking := missing():
        return f"shaped link: {lacking}"
    found = {}
    for mbit in (0, 100):
        with shaped_hosts(mbit) as hosts, TemporaryDirectory() as folder:
            path = Path(folder, "times.json")
            names = list(hosts.names)[:2]
            meeting = {"MASTER_ADDR": hosts.address(names[0]), "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
            ranks = [
                subprocess.Popen(
                    hosts.command(name, sys.executable, __file__, "--on-host", str(steps)),
                    env={
                        **os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                        "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0", "DISTWRAP_REPORT": str(path),
                        "DISTWRAP_QUIET": "1",
                    },
                )
                for rank, name in enumerate(names)
            ]  # fmt: skip
            for rank in ranks:
                rank.wait(300)
            found[mbit] = json.loads(path.read_text())
    slow, fast = found[100], found[0]
    longer = (slow["step"] - fast["step"] + fast["link"]) / slow["step"]
    advised = any("exchange of" in piece["text"] for piece in slow["advice"])
    return _share(
        "link of 100 Mbit/s", slow["link"] / slow["step"], longer, f"the exchange: {slow['link'] * 1e3:.1f} ms", advised
    )


def sums(steps: int) -> Row:
    """Return the row of what the parts add up to, beside the time of a step by the clock."""
    found, seconds = measured(slow_forward_on_one, steps)
    ratio = found["step"] / seconds
    return Row(
        "parts of a step added up, step",
        Samples([found["step"]]),
        Samples([seconds]),
        "ms",
        f"{ratio:.4f} times",
        "within 2 %",
        abs(ratio - 1) <= 0.02,
    )


def alone(steps: int) -> Row:
    """Return the row of the step of one rank alone, as predicted from two, and as measured."""
    predicted, taken = [], []
    for _ in range(5):
        predicted.append(measured(plain, steps)[0]["alone"])
        taken.append(measured.options(nprocs=1)(plain, steps)[1])
    ours, theirs = Samples(predicted), Samples(taken)
    ratio = ours.over(theirs)
    return Row(
        "step of one rank alone: predicted from two, measured",
        ours,
        theirs,
        "ms",
        f"{ratio:.3f} times",
        "within 10 %",
        abs(ratio - 1) <= 0.1,
    )


@dw.distributed(nprocs=2)
def costs(rounds: int) -> dict[str, Samples]:
    """Time a step of about 5 ms: as it is, with a report, and under torch's profiler."""
    model = dw.wrap_model(nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, 512, generator=dw.rank_generator(0))
    calls = 20

    def steps() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - began) / calls

    def reported() -> float:
        with dw.report():
            steps()  # its first step places what is placed once
            return steps()

    def profiled() -> float:
        with profile() as profiler:
            began = time.perf_counter()
            for _ in range(calls):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()
            return (time.perf_counter() - began) / calls

    in_turns({"plain": steps}, 6)  # until what looks at the first steps is gone
    return in_turns({"plain": steps, "report": reported, "profiler": profiled}, rounds)


def cost_rows(rounds: int) -> list[Row]:
    taken = costs(rounds)
    rows = []
    for way, goal in (("report", 1.01), ("profiler", None)):
        ratio = taken[way].over(taken["plain"])
        words = (f"<= {goal} times", ratio <= goal) if goal is not None else ("", None)
        rows.append(Row(f"step with {way}, without", taken[way], taken["plain"], "ms", f"{ratio:.4f} times", *words))
    return rows


TOP = """
import sys, time
import torch
import distwrap as dw

@dw.distributed(nprocs=int(sys.argv[1]))
def main():
    model = dw.wrap_model(torch.nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 10, generator=dw.rank_generator(0))
    until, steps = time.monotonic() + float(sys.argv[2]), 0
    while dw.agree(time.monotonic() < until, "all"):
        model(x).sum().backward()
        optimizer.step()
        steps += 1
        time.sleep(0.2)
    return steps

print(main())
"""


def top(seconds: float) -> Row:
    """Return the row of the processor time of `top` on a run of 16 ranks."""
    with TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TOP)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "DISTWRAP_QUIET": "1"}
        run = subprocess.Popen(
            [sys.executable, script, str(RANKS_OF_TOP), str(seconds + 20)], env=env, stdout=subprocess.DEVNULL
        )
        try:
            time.sleep(15)
            command = [sys.executable, "-m", "distwrap", "top", str(run.pid)]
            looking = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
            time.sleep(5)  # its imports
            began = _processor(looking.pid)
            time.sleep(seconds)
            used = (_processor(looking.pid) - began) / seconds
            looking.kill()
            looking.wait()
        finally:
            run.terminate()
            run.wait(30)
    return Row(
        f"processor of `top` on {RANKS_OF_TOP} ranks, of a core",
        Samples([used]),
        None,
        "s",
        f"{100 * used:.2f} %",
        "< 2 %",
        used < 0.02,
    )


def _processor(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    args = arguments(__doc__, **{"on-host": {"type": int, "help": argparse.SUPPRESS}})
    if args.on_host:
        dw.distributed(plain)(args.on_host)
        return
    steps = 20 if args.quick else 200
    rows, notes = shares(steps), []
    link = shaped_link(steps)
    (rows if isinstance(link, Row) else notes).append(link)  # type: ignore[arg-type, attr-defined]
    rows += [sums(steps), alone(steps), *cost_rows(5 if args.quick else 100), top(3 if args.quick else 20)]
    report("loops that are slow on purpose: 2 ranks, gloo", rows, notes, args)


if __name__ == "__main__":
    main()
