"""Loops that are slow on purpose: what the report finds beside what was put in.

Each loop is slow in one way that it times by itself; the report knows nothing of that. The shares of a step are
compared: found by the report, and put in. The shaped link needs root, iproute2 and the kernel's tbf.

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
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from command_line import arguments, left_out_of_quick
from samples import Samples
from slow_link import missing, shaped_hosts
from table import Row, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw

ROOT = Path(__file__).resolve().parent.parent
CHANNELS, SIZE, BATCH = 48, 14, 32
POINTS = 0.03  # by which a share may be off
LENGTHS = [0.01, 0.08]  # seconds that forwards of uneven batches take


class Spent:
    """Seconds that a loop has spent on what makes it slow, by its own clock."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def here(self) -> Iterator[None]:
        """Count what is inside a ``with``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


class Data(TensorDataset):
    """Samples that take a while."""

    def __init__(self, count: int, seconds: float, spent: Spent) -> None:
        super().__init__(torch.randn(count, CHANNELS, SIZE, SIZE))
        self.seconds, self.spent = seconds, spent

    def __getitem__(self, index: int) -> Any:
        if self.seconds:
            with self.spent.here():
                time.sleep(self.seconds)
        return super().__getitem__(index)


class Net(nn.Module):
    """Convolutions, and linear weights that are to be exchanged; before them something may take a while."""

    def __init__(self, before: Callable[[], None], weights: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()) for _ in range(8))
        )
        self.last = nn.Linear(CHANNELS, max(1, weights // CHANNELS))
        self.before = before

    def forward(self, x: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            self.before()
        return self.last(self.layers(x).mean((2, 3)))


def busy(seconds: float) -> None:
    """Compute for a while."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


Each = Callable[[int, nn.Module], None]
Loop = Callable[[int, Spent], float]


def train(
    steps: int,
    spent: Spent,
    before: Callable[[], None] = lambda: None,
    of_data: float = 0.0,
    each: Each | None = None,
    weights: int = 1000,
    batch: int = BATCH,
) -> float:
    """Train for some steps; return the seconds of one, of which the first is not counted."""
    data = Data((steps + 1) * batch * dw.world_size(), of_data / batch, spent)
    model = dw.wrap_model(Net(before, weights))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    began = ended = 0.0
    for step, (x,) in enumerate(dw.shard_loader(DataLoader(data, batch_size=batch))):
        model(x).square().mean().backward()
        optimizer.step()
        ended = time.perf_counter()
        if not step:
            began, spent.seconds = ended, 0.0
        optimizer.zero_grad()
        if each is not None and step < steps:
            with spent.here():
                each(step, model)
    return (ended - began) / steps


def on(rank: int) -> bool:
    """Return whether this is a rank."""
    return dw.rank() == rank


# Ways to be slow; each returns the seconds of a step.


def plain(steps: int, spent: Spent) -> float:
    return train(steps, spent)


def healthy(steps: int, spent: Spent) -> float:
    """Much to compute for each exchange, which on these tiny models is mostly the time of a message."""
    return train(steps, spent, batch=3 * BATCH)


def slow_loader(steps: int, spent: Spent) -> float:
    return train(steps, spent, of_data=0.06)


def slow_loader_on_one(steps: int, spent: Spent) -> float:
    return train(steps, spent, of_data=0.06 if on(1) else 0.0)


def slow_forward_on_one(steps: int, spent: Spent) -> float:
    def compute() -> None:
        with spent.here():
            busy(0.04 if on(1) else 0.0)

    return train(steps, spent, before=compute)


def evaluation_on_one(steps: int, spent: Spent) -> float:
    def evaluate(step: int, model: nn.Module) -> None:
        with torch.no_grad():
            for _ in range(20 if on(0) and step % 10 == 9 else 0):
                model(torch.randn(BATCH, CHANNELS, SIZE, SIZE))

    return train(steps, spent, each=evaluate)


def checkpoints(steps: int, spent: Spent) -> float:
    every = min(20, steps)
    with TemporaryDirectory() as folder:
        path, more = dw.broadcast(folder) + "/last.pt", torch.zeros(125_000_000 if steps > QUICK_STEPS else 1_000_000)

        def save(step: int, model: nn.Module) -> None:
            if step % every == every - 1:
                dw.save({"model": model, "more": more}, path)

        taken = train(steps, spent, each=save)
        dw.barrier()
        return taken


def uneven_batches(steps: int, spent: Spent) -> float:
    """Long and short forwards; each rank knows the other's too, and counts how long it waits for these."""
    mine, other = random.Random(dw.rank()), random.Random(1 - dw.rank())

    def compute() -> None:
        own = mine.choice(LENGTHS)
        spent.seconds += max(0.0, other.choice(LENGTHS) - own)
        busy(own)

    return train(steps, spent, before=compute)


def two_threads(steps: int, spent: Spent) -> float:
    torch.set_num_threads(2)
    return train(steps, spent)


def one_cpu(steps: int, spent: Spent) -> float:
    """Two threads a rank, and rank 1 may run on one CPU alone."""
    if on(1):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return two_threads(steps, spent)


def without_neighbour(steps: int, spent: Spent) -> float:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dw.rank()]})
    return train(steps, spent)


def busy_neighbour(steps: int, spent: Spent) -> float:
    """Each rank has a CPU of its own, and on rank 1's another program computes."""
    last = sorted(os.sched_getaffinity(0))[1]
    command = f"import os; os.sched_setaffinity(0, {{{last}}})\nwhile True: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", command]) if on(1) else None
    try:
        return without_neighbour(steps, spent)
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()


Measured = tuple[dict[str, Any], float, list[float]]


def measure(loop: Loop, steps: int) -> Measured:
    """Return the report's figures, the seconds of a step, and what each rank has spent on what makes it slow."""
    torch.set_num_threads(1)
    spent = Spent()
    with dw.report() as found:
        seconds = loop(steps, spent)
    return found.figures, seconds, dw.gather_object(spent.seconds / steps)


measured = dw.distributed(nprocs=2)(measure)


@dw.distributed(nprocs=2)
def measured_at_once(loops: list[Loop], steps: int) -> list[Measured]:
    """Return the same of several loops, which the same ranks run one after the other."""
    cpus, found = os.sched_getaffinity(0), []
    for loop in loops:
        os.sched_setaffinity(0, cpus)
        found.append(measure(loop, steps))
    return found


STEPS, ROUNDS = 50, 5  # the medians of the rounds count: processes that do the same differ by up to 10 %
QUICK_STEPS = 5
QUICK: list[Loop] = [slow_loader_on_one, checkpoints, without_neighbour, busy_neighbour, healthy]
# Loops in which ranks lag, which ones, and in what part of the step.
LAGS: list[tuple[Loop, list[int], str]] = [
    (slow_loader_on_one, [1], "data"),
    (slow_forward_on_one, [1], "forward"),
    (evaluation_on_one, [0], "evaluation"),
    (uneven_batches, [0, 1], "forward"),
]
# Loops that all ranks are slow in, the part, and a word of the advice.
PARTS: list[tuple[Loop, str, str]] = [(slow_loader, "data", "its loader"), (checkpoints, "checkpoint", "checkpoints")]
# Loops in which rank 1 waits for a CPU, the same without that, and words of the advice.
CPUS: list[tuple[Loop, Loop, str]] = [
    (busy_neighbour, without_neighbour, "for a free CPU"),
    (one_cpu, two_threads, "may run on 1 CPU"),
]
SLOW = [loop for loop, *_ in (*LAGS, *PARTS, *CPUS)]


def shares(measured: Callable[[Loop, int], Measured], loops: Collection[Loop], steps: int, rounds: int) -> list[Row]:
    """Return a row for each loop: the share that the report has found, beside what was put in.

    Args:
        measured: runs a loop on two ranks.
        loops: slow ones to run.
        steps: of each run.
        rounds: runs of each loop.
    """
    rows = []
    for loop, ranks, part in (each for each in LAGS if each[0] in loops):
        told = Told(loop.__name__)
        for _ in range(rounds):
            found, seconds, spent = measured(loop, steps)
            # Of ranks that take turns one waits at a time.
            put_in = sum(spent) if len(ranks) == 2 else spent[ranks[0]] - spent[1 - ranks[0]]
            told.add_lag(found, put_in / seconds, ranks, part)
        rows.append(told.row())
    for loop, part, words in (each for each in PARTS if each[0] in loops):
        told = Told(loop.__name__)
        for _ in range(rounds):
            found, seconds, spent = measured(loop, steps)
            share = found["parts"][part] / found["step"]
            advised = any(words in each["text"] for each in found["advice"][:1])
            told.add(share, sum(spent) / 2 / seconds, f"all ranks: {part}", advised)
        rows.append(told.row())
    for loop, before, words in (each for each in CPUS if each[0] in loops):
        told = Told(loop.__name__)
        for _ in range(rounds):
            _, without, _ = measured(before, steps)
            found, seconds, _ = measured(loop, steps)
            told.add_lag(found, (seconds - without) / seconds, [1], "", named=words)
        rows.append(told.row())
    told = Told("a healthy loop: pieces of advice")
    for _ in range(rounds):
        found, _, _ = measured(healthy, steps)
        advice = [each["text"] for each in found["advice"]]
        told.add(len(advice), 0, "; ".join(advice) or "none", not advice)
    return [*rows, told.row()]


class Told:
    """What the report has told of one loop, in several runs."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.found: list[float] = []
        self.put_in: list[float] = []
        self.named: Counter[str] = Counter()
        self.right = 0

    def add(self, found: float, put_in: float, named: str, right: bool) -> None:
        """Add a run: a share found and put in, what was named, and whether that is right."""
        self.found.append(found)
        self.put_in.append(put_in)
        self.named[named] += 1
        self.right += right

    def add_lag(self, found: dict[str, Any], put_in: float, ranks: list[int], part: str, named: str = "") -> None:
        """Add a run in which the longest lag should be of some ranks, in a part, and for a reason."""
        lag = (found["lags"] or [{"ranks": [], "part": "", "share": 0.0, "takes_turns": False}])[0]
        right = lag["ranks"] == ranks and lag["part"].startswith(part) and lag["takes_turns"] == (len(ranks) > 1)
        right = right and named in " ".join(each["text"] for each in found["advice"][:1])
        turns = ", in turns" if lag["takes_turns"] else ""
        self.add(lag["share"], put_in, f"rank {lag['ranks']}{turns}: {lag['part']} {named}".strip(), right)

    def row(self) -> Row:
        """Return the row; the columns hold shares, of which a second is the whole."""
        found, put_in = Samples(self.found), Samples(self.put_in)
        named = f"{self.named.most_common(1)[0][0]} ({self.right} of {len(self.found)} right)"
        met = abs(found.median - put_in.median) <= POINTS and self.right > len(self.found) / 2
        return Row(self.what, found, put_in, "s", named, f"named, {POINTS} off", met)


WEIGHTS = 250_000  # 1 MB of gradients, 80 ms at 100 Mbit/s


def shaped_link(steps: int, rates: Sequence[int] = (0, 100)) -> Row | str:
    """Return the row of a link of 100 Mbit/s between hosts; a note where there can be none.

    Args:
        steps: of each run.
        rates: Mbit/s of the links; 0 is unshaped. Without a run at 0, the share put in is that found.
    """
    if lacking := missing():
        return f"shaped link: {lacking}"
    found, told = {}, Told("link of 100 Mbit/s")
    for mbit in rates:
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
                    },
                )
                for rank, name in enumerate(names)
            ]  # fmt: skip
            for rank in ranks:
                rank.wait(300)
            found[mbit] = json.loads(path.read_text())
    slow, fast = found[100], found[rates[0]]
    longer = (slow["step"] - fast["step"] + fast["link"]) / slow["step"]
    told.add(slow["link"] / slow["step"], longer, "the exchange", "exchange of" in slow["advice"][0]["text"])
    return told.row()


def on_host(steps: int) -> float:
    torch.set_num_threads(1)
    return train(steps, Spent(), weights=WEIGHTS)


def main() -> None:
    os.environ["DISTWRAP_QUIET"] = "1"
    args = arguments(__doc__, **{"on-host": {"type": int, "help": argparse.SUPPRESS}})
    if args.on_host:
        dw.distributed(on_host)(args.on_host)
        return
    if args.quick:
        # One launch: each takes seconds of imports, which these ranks share.
        found = dict(zip(QUICK, measured_at_once(QUICK, QUICK_STEPS), strict=True))
        rows = shares(lambda loop, steps: found[loop], QUICK, QUICK_STEPS, 1)
        link = shaped_link(QUICK_STEPS, rates=[100])
        notes = left_out_of_quick([loop.__name__ for loop in SLOW if loop not in QUICK])
    else:
        rows, link, notes = shares(measured, SLOW, STEPS, ROUNDS), shaped_link(STEPS), []
    (rows if isinstance(link, Row) else notes).append(link)  # type: ignore[arg-type]
    report("loops that are slow on purpose: share of a step found, share put in; 2 ranks, gloo", rows, notes, args)


if __name__ == "__main__":
    main()
