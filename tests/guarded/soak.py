"""Train for a while with all that runs beside a loop, and hold what the run takes from the machine to be flat.

    python -m tests.guarded.soak [--seconds 600] [--launcher fork] [--json FILE]

Batches from loader workers, lockstep, a checkpoint in the background every second, an evaluation every two. Each rank
measures itself twice a second. The medians of the second and of the last third of the time are compared, so that what
is taken once, as at the first save, is no growth. Exit code: 1 where something has grown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap import distributed

LIMITS = {  # by how much the median of the last third may be above that of the second
    "memory, MB": 8.0,
    "descriptors": 2.0,
    "threads": 1.0,
    "mappings": 6.0,
    "files in /tmp": 2.0,
    "KB in /tmp": 256.0,
    "files in /dev/shm": 3.0,
    "KB in /dev/shm": 1024.0,
    "processes": 1.0,
    "KB in the store": 1024.0,
}


def measure(temporary: Path) -> dict[str, float]:
    """Return what this process, its children, and the folders of the run take now."""
    found = {
        "memory, MB": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "processes": sum(len(Path(f"/proc/self/task/{each}/children").read_text().split()) for each in _threads()),
    }
    for name, folder in (("/tmp", temporary), ("/dev/shm", Path("/dev/shm"))):
        sizes = []
        for file in folder.rglob("*"):
            with contextlib.suppress(OSError):  # it may be gone meanwhile
                status = file.lstat()
                if status.st_uid == os.getuid():
                    sizes.append(status.st_size)
        found |= {f"files in {name}": float(len(sizes)), f"KB in {name}": sum(sizes) / 1000}
    return found | {"KB in the store": _store()}


def _store() -> float:
    """Return the length of the file in the caller's memory through which the ranks have met."""
    for held in Path(f"/proc/{os.getppid()}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "distwrap-store" in os.readlink(held):
                return held.stat().st_size / 1000
    return 0.0


def _threads() -> list[str]:
    main = str(os.getpid())  # the loader's workers and the writer are started by the main thread
    return [main] if os.path.exists(f"/proc/self/task/{main}/children") else []


def train(seconds: float, folder: str) -> list[tuple[float, dict[str, float]]]:
    """Train until the time is over, and return this rank's measurements, with the seconds of each."""
    data = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
    model = dw.wrap_model(torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = dw.shard_loader(DataLoader(data, batch_size=16, shuffle=True, num_workers=1, persistent_workers=True))
    held_out = dw.shard_loader(DataLoader(data, batch_size=64))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "run": dw.run_state()}
    began = time.monotonic()
    saved = evaluated = began
    measured: list[tuple[float, dict[str, float]]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            measured.append((time.monotonic() - began, measure(Path(tempfile.gettempdir()))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        running = True
        while running:
            for x, y in dw.lockstep(loader):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                dw.optimizer_step(optimizer, model=model)
                now = time.monotonic()
                if dw.agree(now - saved > 1, "any"):
                    dw.save(state, f"{folder}/last.pt", background=True, keep=2)
                    saved = now
                if dw.agree(now - evaluated > 2, "any"):
                    model.eval()
                    with torch.no_grad():
                        losses = [torch.nn.functional.mse_loss(model(x), y).item() for x, y in held_out]
                    dw.mean(sum(losses), len(losses))
                    model.train()
                    evaluated = now
                running = not dw.agree(now - began > seconds, "any")
                if not running:
                    break
    finally:
        over.set()
        watcher.join()
    return measured


def growth(measured: list[tuple[float, dict[str, float]]], seconds: float) -> dict[str, tuple[float, float]]:
    """Return the medians of the second and of the last third of the time, by what was measured."""
    thirds = [[each for at, each in measured if int(3 * at / seconds) == third] for third in (1, 2)]
    return {
        name: (statistics.median(each[name] for each in thirds[0]), statistics.median(each[name] for each in thirds[1]))
        for name in LIMITS
    }


def soak(seconds: float, launcher: str, folder: str) -> list[dict[str, tuple[float, float]]]:
    """Return the two medians of each rank, by what was measured."""
    # The run's own temporary files are the only ones in the folder that is measured.
    temporary = Path(folder, "tmp")
    temporary.mkdir()
    before, os.environ["TMPDIR"], tempfile.tempdir = os.environ.get("TMPDIR"), str(temporary), None
    try:
        run = distributed(nprocs=2, launcher=launcher, returns="all", timeout=60)(train)  # type: ignore[call-overload]
        found: list[Any] = run(seconds, folder)
    finally:
        tempfile.tempdir = None
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    return [growth(each, seconds) for each in found]


def grown(found: list[dict[str, tuple[float, float]]]) -> list[str]:
    """Return a line for each thing of which a rank took more and more."""
    return [
        f"rank {rank}: {name}: {before:.1f} in the second third, {after:.1f} in the last"
        for rank, each in enumerate(found)
        for name, (before, after) in each.items()
        if after - before > LIMITS[name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--launcher", default="fork")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(given.seconds, given.launcher, folder)
    print(f"{'median of':<26} {'2nd third':>10} {'last third':>10}")
    for rank, each in enumerate(found):
        for name, (before, after) in each.items():
            print(f"rank {rank}  {name:<18} {before:>10.1f} {after:>10.1f}")
    if given.json:
        given.json.write_text(json.dumps(found))
    problems = grown(found)
    print("\n".join(problems) or "flat", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
