"""Seconds of work that a death costs: under `max_lost`, where the others go on, and under `max_restarts`.

Two ranks train; one is killed in the middle of an epoch. What the death costs is the time from it until the run is
further than it was. Under `max_restarts` torch elastic starts all ranks again, and they go on from the checkpoint that
the loop writes after each epoch, as in `examples/elastic.py`.

    python benchmarks/lost_ranks.py [--quick] [--json FILE] [--plot FILE.png]     # nine minutes; needs torchft
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from command_line import arguments, compare
from samples import Samples
from table import Row, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap

BATCH, FEATURES = 8, 64
STEP_SECONDS = 0.1
GOAL = 0.1


def train(folder: Path, batches: int, ways: str) -> None:
    """Train for two epochs of so many steps, and die once in the middle of the first."""
    first, number = 0, distwrap.rank()
    model = distwrap.wrap_model(nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(0)
    x = torch.randn(2 * BATCH * batches, FEATURES)
    loader = distwrap.shard_loader(DataLoader(TensorDataset(x, x[:, :1]), batch_size=BATCH, shuffle=True))
    if ways == "restarts" and (state := distwrap.resume_from(folder / "last.pt")) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
        loader.set_epoch(first)
    log = open(folder / f"steps-{os.getpid()}", "w", buffering=1)  # noqa: SIM115 - of this process's whole life
    epochs = distwrap.resumable(range(2)) if ways == "lost" else range(first, 2)
    for epoch in epochs:
        for a, b in loader:
            place = epoch * batches + loader.state_dict()["consumed"] / (2 * BATCH)
            if number == 1 and epoch == 0 and place >= batches / 2 and not (folder / "death").exists():
                (folder / "death").write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(STEP_SECONDS)  # the device computes
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            before = model.weight.detach().clone()
            optimizer.step()
            if not torch.equal(before, model.weight):  # else the step was not taken
                log.write(f"{time.time()!r} {place}\n")
        if ways == "restarts":
            distwrap.save({"model": model, "optimizer": optimizer, "epoch": epoch + 1}, folder / "last.pt")


def seconds_lost(batches: int, ways: str) -> float:
    """Return the seconds from the death of a rank until the run is further than before, without a step's own."""
    options = {"max_lost": 1} if ways == "lost" else {"max_restarts": 1}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        distwrap.distributed(nprocs=2, timeout=60, **options)(train)(folder, batches, ways)  # type: ignore[call-overload]
        death = float((folder / "death").read_text())
        lines = [line.split() for path in folder.glob("steps-*") for line in path.read_text().splitlines()]
    steps = sorted((float(when), float(place)) for when, place in lines)
    furthest = max(place for when, place in steps if when <= death)
    return min(when for when, place in steps if when > death and place > furthest) - death - STEP_SECONDS


def main() -> None:
    args = arguments(__doc__)
    if args.against:
        compare(__file__, args)
        return
    if not find_spec("torchft"):
        sys.exit("torchft is not installed: pip install 'distwrap[torchft]'")
    rows = []
    for batches in (20,) if args.short else (100, 300, 600):
        rounds = 1 if args.short else 2
        ours, theirs = (Samples([seconds_lost(batches, ways) for _ in range(rounds)]) for ways in ("lost", "restarts"))
        ratio = ours.over(theirs)
        what = f"a death, with a checkpoint each {batches * STEP_SECONDS:.0f} s"
        rows.append(Row(what, ours, theirs, "s", f"{ratio:.3f} times", f"< {GOAL}", ratio < GOAL))
    notes = [
        "max_lost waits heartbeat_seconds=2, whatever the checkpoints; max_restarts starts all ranks again, and makes",
        "half of the steps between two checkpoints again",
    ]
    report("lost ranks: seconds of work lost a death", rows, notes, args)


if __name__ == "__main__":
    os.environ.setdefault("DISTWRAP_QUIET", "1")
    main()
