"""Simulated ranks beside real ones: a program of README's shape, a deadlock, and a thousand ranks.

python benchmarks/simulate.py [--quick] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from command_line import arguments, compare
from samples import Samples, in_turns
from table import Row, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import barrier, mean, rank, shard_loader, wrap_model
from distwrap.errors import DeadlockError
from distwrap.testing import run_ranks, simulate, stop_server

SECONDS, GIGABYTES, MILLISECONDS = 60.0, 4.0, 20.0  # the goals
MANY = """
import sys
sys.path.insert(0, {folder!r})
import simulate
print(simulate.many({ranks}))
"""


def train(steps: int, batch: int) -> float:
    """README's loop."""
    torch.manual_seed(0)
    x = torch.randn(steps * batch, 3)
    model = wrap_model(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = shard_loader(DataLoader(data, batch_size=batch, shuffle=True), batch_size="global", order="stream", seed=0)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return mean(loss.item(), len(inputs))


def deadlock() -> None:
    """Rank 0 waits for ranks that do not come."""
    if rank() == 0:
        barrier()


def until_it_is_told() -> float:
    """Return the processor seconds until a deadlock of four simulated ranks is an error."""
    begun = time.process_time()
    try:
        simulate(deadlock, 4)
    except DeadlockError:
        return time.process_time() - begun
    raise RuntimeError("no deadlock was seen")


def many(ranks: int) -> tuple[float, float]:
    """Return the processor seconds and gigabytes of two steps on so many simulated ranks."""
    simulate(train, 2, 2, 2)
    begun = time.process_time()
    simulate(train, ranks, 2, ranks)
    return time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """Return a way to time a call."""

    def run() -> float:
        begun = clock()
        call()
        return clock() - begun

    return run


def main() -> None:
    """Time them in turns."""
    args = arguments(__doc__)
    if args.against:
        compare(__file__, args)
        return
    os.environ["DISTWRAP_QUIET"] = "1"
    rounds = 1 if args.quick else 3 if args.short else 9
    steps = 10 if args.quick else 100
    ways = {
        "2 simulated": timed(lambda: simulate(train, 2, steps, 32)),
        "2 real": timed(lambda: run_ranks(train, 2, steps, 32, timeout=120)),
        "1": timed(lambda: run_ranks(train, 1, steps, 32, timeout=120)),
        "deadlock": until_it_is_told,
    }
    for way in ways.values():
        way()
    taken = in_turns(ways, rounds)
    stop_server()
    ours, real, told = taken["2 simulated"], taken["2 real"], taken["deadlock"]
    milliseconds, ranks = 1e3 * told.median, 32 if args.quick else 1024
    code = MANY.format(folder=os.path.dirname(os.path.abspath(__file__)), ranks=ranks)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    seconds, gigabytes = (float(each) for each in done.stdout.strip().strip("()").split(","))
    reached = seconds <= SECONDS and gigabytes <= GIGABYTES
    rows = [
        Row(f"{steps} steps on 2 simulated ranks | real ones", ours, real, "ms", f"{ours.over(real):.2f} times"),
        Row(
            f"{steps} steps on 2 simulated ranks | one rank",
            ours,
            taken["1"],
            "ms",
            f"{ours.over(taken['1']):.2f} times",
        ),
        Row(
            "a deadlock of 4 ranks, until it is told",
            told,
            None,
            "ms",
            f"{milliseconds:.0f} ms of a processor",
            f"<= {MILLISECONDS:g} ms",
            milliseconds <= MILLISECONDS,
        ),
        Row(
            f"2 steps on {ranks} ranks",
            Samples([seconds]),
            None,
            "s",
            f"{seconds:.0f} s of a processor, {gigabytes:.1f} GB",
            f"<= {SECONDS:g} s, {GIGABYTES:g} GB",
            reached,
        ),
    ]
    report("Simulated ranks", rows, [], args)


if __name__ == "__main__":
    main()
