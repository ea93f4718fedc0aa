"""Times of a forward, a step and a batch: distwrap beside hand-written DDP, Fabric and Accelerate, on two ranks.

The models are tiny, so that the overhead around them shows. All ways run in turns in the same processes; the figures
are rank 0's. A note names a peer that is not installed.

    python benchmarks/step.py [--quick] [--json FILE] [--plot FILE.png] [--against CHECKOUT]
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from command_line import arguments, compare
from samples import Samples, in_turns, per_call
from table import Row, report
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from distwrap import distributed, rank, rank_generator, shard_loader, wrap_model
from distwrap.group.world import current_world
from distwrap.model.checks.in_sync import fingerprints
from distwrap.model.checks.optimizers import Optimizers
from distwrap.model.wrapped_models import gradients_of

Taken = dict[str, dict[str, Samples]]
BATCH = 64
GOAL = 1.002  # of a step with comparisons, of one without
PEERS = {"Fabric": "lightning", "Accelerate": "accelerate"}


def main() -> None:
    args = arguments(__doc__)
    if args.against:
        compare(__file__, args)
        return
    rounds, calls = (2, 2) if args.quick else (5, 20) if args.short else (300, 100)
    exponent = 6 if args.quick else 8  # of ten, the weights of a look
    taken = measure.options(nprocs=2)(rounds, calls, exponent)
    notes = [f"{peer}: not installed" for peer in PEERS if peer not in taken["grad"]]
    report("step: 2 ranks, gloo", rows(taken, exponent), notes, args)


@distributed(launcher="forkserver")
def measure(rounds: int, calls: int, exponent: int) -> Taken:
    """Time everything, with so many calls to a round where one is too short to time alone."""
    return {
        "grad": forward_with_grad(rounds, calls),
        "no_grad": forward_without_grad(rounds, calls),
        "step": training_step(rounds, max(1, calls // 10)),
        "batch": loading(rounds),
        "compared": compared_step(max(min(rounds, 5), rounds // 3), calls),
        "look": look(3 if rounds < 10 else 7, 10 ** (exponent // 2)),
    }


def rows(taken: Taken, exponent: int) -> list[Row]:
    grad, no_grad, step, batch = (taken[what] for what in ("grad", "no_grad", "step", "batch"))
    result = [
        _above("forward with gradients: {}, DDP", grad, "DDP", 2),
        _above("forward without gradients: {}, bare module", no_grad, "bare module", 5),
        _over("training step: {}, DDP", step, "DDP", 1.01),
        _above("batch: {}, DistributedSampler", batch, "DistributedSampler"),
        [_compared(taken["compared"]), _looks(taken["look"], exponent)],
    ]
    return [row for rows_of_one in result for row in rows_of_one]


def _above(what: str, ways: dict[str, Samples], than: str, goal: float | None = None) -> list[Row]:
    """Return a row for each way, with how much longer than the plain one it takes. The goal is ours alone."""
    made = []
    for way in ways.keys() - {than}:
        more = ways[way].above(ways[than]) * 1e6
        ours = way == "distwrap" and goal is not None
        words = (f"<= {goal} us", more <= goal) if ours and goal is not None else ("", None)
        made.append(Row(what.format(way), ways[way], ways[than], "us", f"{more:+.2f} us", *words))
    return sorted(made, key=lambda row: "distwrap" not in row.what)


def _over(what: str, ways: dict[str, Samples], than: str, goal: float) -> list[Row]:
    made = []
    for way in ways.keys() - {than}:
        ratio = ways[way].over(ways[than])
        words = (f"<= {goal} times", ratio <= goal) if way == "distwrap" else ("", None)
        made.append(Row(what.format(way), ways[way], ways[than], "ms", f"{ratio:.3f} times", *words))
    return sorted(made, key=lambda row: "distwrap" not in row.what)


def _compared(ways: dict[str, Samples]) -> Row:
    """Return how much longer a step is by the hooks of the comparison."""
    more = 1 + ways["hooks"].median / ways["step"].median
    what = "training step of 10^4 weights: hooks of the comparison, all"
    return Row(what, ways["hooks"], ways["step"], "us", f"{more:.4f} times", f"<= {GOAL} times", more <= GOAL)


def _looks(taken: dict[str, Samples], exponent: int) -> Row:
    """Return how much of the time looks at 10^exponent weights take, when one is due at each power of two of steps."""
    look, step = taken["look"].median, taken["step"].median
    every = 1
    while look > (GOAL - 1) / 2 * step * every:
        every *= 2
    share = look / (step * every)
    words = f"{share:.4f} of the time, at every step number {every}"
    return Row(
        f"look at 10^{exponent} weights, training step",
        taken["look"],
        taken["step"],
        "ms",
        words,
        f"<= {GOAL - 1:.3f}",
        share <= GOAL - 1,
    )


def wrapped_copies(model: nn.Module) -> dict[str, nn.Module]:
    """Return wrapped copies of a model, one for each way that is installed."""
    ways: dict[str, Callable[[nn.Module], Any]] = {"distwrap": wrap_model, "DDP": DistributedDataParallel}
    if importlib.util.find_spec("lightning"):
        from lightning.fabric import Fabric

        warnings.filterwarnings("ignore", message="The `srun` command is available")  # its own, where Slurm is
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", num_nodes=1)
        fabric.launch()
        ways["Fabric"] = fabric.setup
    if importlib.util.find_spec("accelerate"):
        from accelerate import Accelerator

        ways["Accelerate"] = Accelerator(cpu=True).prepare
    return {name: wrap(copy.deepcopy(model)) for name, wrap in ways.items()}


def forward_with_grad(rounds: int, calls: int) -> dict[str, Samples]:
    """Time forwards alone, since a backward with its all-reduce takes so much longer that it would hide them."""
    x = torch.full((1, 1), 1.0 + rank())  # or the ranks would go on looking whether they have other data

    def timed(model: nn.Module) -> Callable[[], float]:
        def forwards() -> float:
            taken = 0.0
            for _ in range(calls):
                start = time.perf_counter()
                y = model(x)
                taken += time.perf_counter() - start
                y.sum().backward()
            return taken / calls

        return forwards

    ways = {name: timed(model) for name, model in wrapped_copies(nn.Linear(1, 1)).items()}
    in_turns(ways, 2)  # DDP arranges its buckets anew after the first backward
    return in_turns(ways, rounds)


def forward_without_grad(rounds: int, calls: int) -> dict[str, Samples]:
    """Time a forward of an evaluation, beside the bare module's."""
    models = wrapped_copies(nn.Linear(1, 1))
    del models["DDP"]  # which would broadcast
    models = {name: model.eval() for name, model in {**models, "bare module": nn.Linear(1, 1)}.items()}
    x = torch.ones(1, 1)
    with torch.no_grad():
        return in_turns({name: per_call(lambda m=model: m(x), calls) for name, model in models.items()}, rounds)


def training_step(rounds: int, calls: int) -> dict[str, Samples]:
    """Time forward, backward with its all-reduce, and the optimizer."""
    models = wrapped_copies(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)))
    x, y = torch.randn(BATCH, 256, generator=rank_generator(0)), torch.randint(10, (BATCH,))
    ways = {name: per_call(_step(model, x, y), calls) for name, model in models.items()}
    in_turns(ways, 1 if rounds < 10 else 6)  # until what looks at the first steps is gone
    return in_turns(ways, rounds)


def _step(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, given: torch.optim.Optimizer | None = None
) -> Callable[[], None]:
    optimizer = given or torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def loading(rounds: int) -> dict[str, Samples]:
    """Time an epoch over a dataset that costs nothing, a batch at a time."""
    data = Numbers()
    ours = shard_loader(DataLoader(data, batch_size=8, shuffle=True))
    theirs = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))

    def epoch(loader: DataLoader[int]) -> Callable[[], float]:
        whole = per_call(lambda: sum(1 for _ in loader), 1)
        return lambda: whole() / len(loader)

    return in_turns({"distwrap": epoch(ours), "DistributedSampler": epoch(theirs)}, rounds)


def compared_step(rounds: int, calls: int) -> dict[str, Samples]:
    """Time steps, and what the comparison of weights does in each of them; whole steps vary by more than that."""
    model: Any = wrap_model(nn.Linear(100, 100, bias=False))
    x, y = torch.randn(BATCH, 100, generator=rank_generator(0)), torch.randint(100, (BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = _step(model, x, y, optimizer)
    step()  # at its first step an optimizer is looked at
    optimizers, watch = current_world().part(Optimizers), gradients_of(model).watch

    def hooks() -> None:
        watch.average()
        optimizers._before(optimizer, (), {})

    def without_looks() -> float:
        due, watch._due = watch._due, sys.maxsize  # looks have a row of their own
        try:
            return per_call(hooks, 100 * calls)()
        finally:
            watch._due = due

    return in_turns({"step": per_call(step, calls), "hooks": without_looks}, rounds)


def look(rounds: int, width: int) -> dict[str, Samples]:
    """Time what one comparison of width^2 weights costs, beside a step of them."""
    model: Any = wrap_model(nn.Linear(width, width, bias=False))
    x, y = torch.randn(BATCH, width, generator=rank_generator(0)), torch.randint(width, (BATCH,))
    watch = gradients_of(model).watch

    def one() -> None:
        fingerprints(watch.held())

    return in_turns({"step": per_call(_step(model, x, y), 1), "look": per_call(one, 1)}, rounds)


class Numbers(Dataset[int]):
    """Dataset of the first thousand numbers."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


if __name__ == "__main__":
    main()
