"""Train the loop of digits.py in one process and then on two ranks, and tell what was won: `make demo`.

    python examples/demo.py
    python examples/demo.py --nprocs 4

Both train as digits.py does, which is shorter: read that one. The network here is larger, so that a step computes much
and the exchange of its gradients costs little beside it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from digits import evaluate, load_data, train  # the file beside this one
from torch import nn
from torch.utils.data import DataLoader

import distwrap
from distwrap import distributed, save, shard_loader, wrap_model


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )


class Training(NamedTuple):
    """Outcome of one training; its seconds are those of each epoch's loop, without the evaluation."""

    accuracy: float
    seconds: list[float]
    device: str


@distributed(nprocs=2)
def main(epochs: int, out: Path) -> Training:
    torch.set_num_threads(1)  # in every process, so that the times are those of one core beside others
    torch.manual_seed(0)
    train_set, test_set = load_data()
    model = wrap_model(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_loader = shard_loader(DataLoader(train_set, batch_size=96, shuffle=True), batch_size="global")
    test_loader = shard_loader(DataLoader(test_set, batch_size=100))
    accuracy, seconds = 0.0, []
    for epoch in range(1, epochs + 1):
        began = time.perf_counter()
        train(model, optimizer, train_loader, epochs=1)
        seconds.append(time.perf_counter() - began)
        accuracy = evaluate(model, test_loader)
        distwrap.print(f"    epoch {epoch} of {epochs}: test accuracy {accuracy:.4f}, {sum(seconds):.1f} s")
    save(model, out)
    return Training(accuracy, seconds, distwrap.device().type)


def compared(one: Training, many: Training, nprocs: int, cores: int) -> str:
    """Return in words whether more ranks were faster, and what to know where they were not."""
    on = f"{cores} core{'s' * (cores > 1)}" if many.device == "cpu" else f"devices of type {many.device}"
    each = ", each with one thread," if many.device == "cpu" else ""
    times = median(one.seconds) / median(many.seconds)
    if times >= 1.05:
        return f"{nprocs} ranks on {on}{each} go through an epoch {times:.1f} times as fast as one process."
    return (
        f"{nprocs} ranks on {on}{each} were not faster than one process here.\n"
        "Ranks gain where each has a core or a device that is free, and where a step\n"
        "computes more than this small network does, beside which the exchange counts."
    )


def next_steps(nprocs: int) -> str:
    """Return three commands to go on with."""
    folder = Path(sys.executable).parent  # not resolved: in a virtual environment it is a link to another Python
    here = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    python, examples = shlex.quote(f"{here}/{Path(sys.executable).name}"), os.path.relpath(Path(__file__).parent)
    commands = {
        f"{examples}/demo.py --nprocs {nprocs * 2}": "more ranks",
        f"-m torch.distributed.run --nproc-per-node={nprocs} {examples}/digits.py": "the same ranks, by torchrun",
        "-m distwrap convert your_script.py": "what would change in a script of yours",
    }
    return "\n".join(f"    {python} {words}    # {why}" for words, why in commands.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on handwritten digits, in one process and on several ranks.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("digits.pt"))
    args = parser.parse_args()
    if args.nprocs < 2:
        parser.error("--nprocs is at least 2: one process is trained first in any case")
    if 0 < torch.cuda.device_count() < args.nprocs:
        print(f"This node has fewer GPUs than {args.nprocs}: the demo trains on its CPU.")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    lines, found = [], []
    for nprocs in (1, args.nprocs):
        name = f"{nprocs} ranks" if nprocs > 1 else "1 process"
        print(f"Training on {name}:", flush=True)
        began = time.perf_counter()
        found.append(main.options(nprocs=nprocs)(args.epochs, args.out))
        in_all = time.perf_counter() - began
        accuracy, seconds = found[-1].accuracy, found[-1].seconds
        lines.append(f"    {name:<12}{accuracy:>8.4f}{median(seconds):>10.2f} s{sum(seconds):>10.1f} s{in_all:>8.1f} s")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    print(f"\n{'':16}accuracy    an epoch    training    in all, with start, data and evaluation")
    print("\n".join(lines))
    print(f"\n{compared(*found, args.nprocs, cores)}")
    print(f"The model of the {args.nprocs} ranks is in {args.out.resolve()}.")
    print(f"\nWhat to try next:\n{next_steps(args.nprocs)}")
