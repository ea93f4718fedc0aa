"""What a forward, a step and a batch cost: distwrap beside hand-written torch, on the same two ranks.

The models are tiny, so that what is around them shows. Both sides run in turns in the same processes; the figures are
rank 0's.

    python benchmarks/step.py [--quick] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from timing import Row, Samples, arguments, in_turns, per_call, report
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from distwrap import distributed, shard_loader, wrap_model

Taken = dict[str, dict[str, Samples]]
BATCH = 64


def main() -> None:
    args = arguments(__doc__)
    taken = measure.options(nprocs=2)(5 if args.quick else 200, 20 if args.quick else 200)
    report("step: 2 ranks, gloo", rows(taken), [], args)


@distributed(launcher="forkserver")
def measure(rounds: int, calls: int) -> Taken:
    """Time everything; `calls` to a round for what is too short to time alone."""
    return {
        "grad": forward_with_grad(rounds, calls),
        "no_grad": forward_without_grad(rounds, calls),
        "step": training_step(rounds, max(1, calls // 10)),
        "batch": loading(rounds),
    }


def rows(taken: Taken) -> list[Row]:
    grad, no_grad, step, batch = (taken[what] for what in ("grad", "no_grad", "step", "batch"))
    with_grad = grad["ours"].above(grad["theirs"]) * 1e6
    without_grad = no_grad["ours"].above(no_grad["theirs"]) * 1e6
    ratio = step["ours"].over(step["theirs"])
    per_batch = batch["ours"].above(batch["theirs"]) * 1e6
    return [
        _row("forward with gradients: wrap_model, DDP", grad, "us", f"{with_grad:+.2f} us", "<= 2 us", with_grad <= 2),
        _row(
            "forward without gradients: wrap_model, bare module",
            no_grad,
            "us",
            f"{without_grad:+.2f} us",
            "<= 5 us",
            without_grad <= 5,
        ),
        _row("training step: wrap_model, DDP", step, "ms", f"{ratio:.3f} times", "1.01 times (informs)"),
        _row("batch: shard_loader, DistributedSampler", batch, "us", f"{per_batch:+.2f} us"),
    ]


def _row(what: str, pair: dict[str, Samples], unit: str, figure: str, goal: str = "", met: bool | None = None) -> Row:
    return Row(what, pair["ours"], pair["theirs"], unit, figure, goal, met)


def forward_with_grad(rounds: int, calls: int) -> dict[str, Samples]:
    """Time a forward that a backward could follow; none does in the timed part, as its all-reduce would drown it."""
    ours, theirs = _wrapped_alike(nn.Linear(1, 1))
    x = torch.ones(1, 1)
    for model in (ours, theirs):
        for _ in range(2):  # DDP arranges its buckets anew after the first backward
            model(x).sum().backward()
    return in_turns({"ours": per_call(lambda: ours(x), calls), "theirs": per_call(lambda: theirs(x), calls)}, rounds)


def forward_without_grad(rounds: int, calls: int) -> dict[str, Samples]:
    """Time a forward of an evaluation, beside the bare module's."""
    ours, _ = _wrapped_alike(nn.Linear(1, 1))
    bare = nn.Linear(1, 1)
    x = torch.ones(1, 1)
    with torch.no_grad():
        return in_turns({"ours": per_call(lambda: ours(x), calls), "theirs": per_call(lambda: bare(x), calls)}, rounds)


def training_step(rounds: int, calls: int) -> dict[str, Samples]:
    """Time forward, backward with its all-reduce, and the optimizer."""
    ours, theirs = _wrapped_alike(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)))
    x, y = torch.randn(BATCH, 256), torch.randint(10, (BATCH,))
    ways = {"ours": per_call(_step(ours, x, y), calls), "theirs": per_call(_step(theirs, x, y), calls)}
    in_turns(ways, 1)
    return in_turns(ways, rounds)


def _step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

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

    return in_turns({"ours": epoch(ours), "theirs": epoch(theirs)}, rounds)


class Numbers(Dataset[int]):
    """The first thousand numbers."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


def _wrapped_alike(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return wrap_model(copy.deepcopy(model)), DistributedDataParallel(model)


if __name__ == "__main__":
    main()
