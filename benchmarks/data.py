"""Data: the time to the first batch at any size, the time of a batch, and the time to go on from the middle.

Each figure about size is taken on rank 0 of 2 real ranks, in processes of their own, which have their imports behind
them; in a short run the same two take all. Memory is what the process's peak grows by. Fabric and Accelerate are
measured where they are installed.

    python benchmarks/data.py [--quick] [--json FILE] [--plot FILE.png] [--against CHECKOUT]
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from command_line import arguments, compare, left_out_of_quick
from samples import Samples, in_turns
from table import Row, report
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 64
MIDDLE = 10**8
LARGEST = {"distwrap": 10**9, "distwrap stream": 10**9, "DistributedSampler": 5 * 10**7}
MOST_OF_PEERS = 5 * 10**7  # ten times as many take more memory than most machines have
FIRST_SECONDS, FIRST_BYTES = 0.05, 20e6
WAYS = ("distwrap", "distwrap stream", "DistributedSampler", "Fabric", "Accelerate")
MODULES = {"Fabric": "lightning", "Accelerate": "accelerate"}
Job = tuple[str, str, int]  # what is measured, of which way, and of how many
Figures = dict[str, Any]


class Numbers(Dataset[int]):
    """Dataset of any size whose samples are their own indices."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def main() -> None:
    if "--measure" in sys.argv:
        measure([tuple(job) for job in json.loads(sys.argv[-1])])
        return
    args = arguments(__doc__)
    if args.against:
        compare(__file__, args)
        return
    sizes = [10**4, 10**6] if args.short else [10**4, 10**5, 10**6, 10**7, 5 * 10**7, 10**8, 10**9]
    rounds = 3
    ways = [way for way in WAYS if way != "Fabric" or not args.quick]
    present = [way for way in ways if importlib.util.find_spec(MODULES.get(way, "torch"))]
    jobs: list[Job] = [("first", way, n) for way in present for n in sizes if n <= _largest(way)]
    jobs += [
        ("batches", ",".join(present), 1 if args.quick else 5 if args.short else 50),
        ("resume", "distwrap", MIDDLE),
    ]
    found = dict(zip(jobs, _in_ranks(*jobs), strict=True)) if args.short else {}

    def figures_of(job: Job) -> list[Figures]:
        return [found[job]] if args.short else [_in_ranks(job)[0] for _ in range(1 if job[0] == "batches" else rounds)]

    figures = {job: figures_of(job) for job in jobs}
    firsts = {(way, n): each for (what, way, n), each in figures.items() if what == "first"}
    rows = [*_first_rows(firsts, sizes), *batch_rows(present, figures[jobs[-2]][0]), resume_row(figures[jobs[-1]])]
    notes = [f"{way}: not installed" for way in ways if way not in present]
    notes += left_out_of_quick([way for way in WAYS if way not in ways])
    notes.append(_memory(firsts, sizes))
    plot, args.plot = args.plot, None
    report("data: rank 0 of 2, batches of 64, no workers", rows, notes, args)
    if plot:
        draw(firsts, sizes, plot)


def _first_rows(firsts: dict[tuple[str, int], list[Figures]], sizes: list[int]) -> list[Row]:
    rows = []
    for way in ("distwrap", "distwrap stream"):
        for n in sizes:
            measured = Samples([figures["seconds"] for figures in firsts[way, n]])
            other = firsts.get(("DistributedSampler", n))
            theirs = Samples([figures["seconds"] for figures in other]) if other else None
            megabytes = max(figures["bytes"] for figures in firsts[way, n]) / 1e6
            met = measured.median < FIRST_SECONDS and megabytes * 1e6 < FIRST_BYTES
            what = f"first batch of {n:.0e}: order={'stream' if way.endswith('stream') else 'auto'}, DistributedSampler"
            rows.append(Row(what, measured, theirs, "ms", f"{megabytes:.1f} MB", "< 50 ms, < 20 MB", met))
    return rows


def batch_rows(present: list[str], taken: Figures) -> list[Row]:
    """Put the time of a batch beside that of one of the bare loader."""
    bare = Samples(taken["bare"])
    rows = []
    for way in present:
        above = Samples(taken[way]).above(bare) * 1e6
        ours = way.startswith("distwrap")
        goal, met = ("<= 10 us", above <= 10) if ours else ("", None)
        rows.append(
            Row(f"a batch: {way}, the bare loader", Samples(taken[way]), bare, "us", f"{above:+.1f} us", goal, met)
        )
    return rows


def resume_row(figures: list[Figures]) -> Row:
    """Tell the time from a plain loader to the next batch in the middle of an epoch."""
    measured = Samples([each["seconds"] for each in figures])
    what = f"on from the middle of {MIDDLE:.0e}: load_state_dict to the next batch"
    return Row(what, measured, None, "ms", f"{measured.median * 1e3:.0f} ms", "< 100 ms", measured.median < 0.1)


def _memory(firsts: dict[tuple[str, int], list[Figures]], sizes: list[int]) -> str:
    lines = []
    for way in dict.fromkeys(way for way, _ in firsts):
        cells = []
        for n in sizes:
            if (way, n) in firsts:
                best = min(firsts[way, n], key=lambda figures: figures["seconds"])
                cells.append(f"{n:.0e}: {best['seconds'] * 1e3:.0f} ms, {best['bytes'] / 1e6:.0f} MB")
        lines.append(f"first batch by {way}: {'; '.join(cells)}")
    return "\n".join(lines)


def _largest(way: str) -> int:
    return LARGEST.get(way, MOST_OF_PEERS)


# In the ranks


def _in_ranks(*jobs: Job) -> list[Figures]:
    """Return rank 0's figures of each job, one after the other in the same two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DISTWRAP_QUIET": "1"}
    words = [*command, "--measure", json.dumps(jobs)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=env)
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if done.returncode or len(found) != len(jobs):
        raise SystemExit(f"{jobs} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return [json.loads(line.removeprefix("FOUND ")) for line in found]


def measure(jobs: list[Job]) -> None:
    """Measure in a rank, and print rank 0's figures."""
    torch.distributed.init_process_group("gloo")
    for what, way, number in jobs:
        figures = {"first": _first, "batches": _batches, "resume": _resume}[what](way, number)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            print("FOUND " + json.dumps(figures), flush=True)
    torch.distributed.destroy_process_group()


def _sharder(way: str) -> Callable[[DataLoader[Any]], Any]:
    if way.startswith("distwrap"):
        from distwrap import shard_loader

        order: Any = "stream" if way.endswith("stream") else "auto"
        return lambda loader: shard_loader(loader, order=order)
    if way == "Fabric":
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", num_nodes=1)
        fabric.launch()
        return fabric.setup_dataloaders  # type: ignore[no-any-return]
    if way == "Accelerate":
        from accelerate import Accelerator

        return Accelerator(cpu=True).prepare  # type: ignore[no-any-return]
    return lambda loader: DataLoader(
        loader.dataset, batch_size=BATCH, sampler=DistributedSampler(loader.dataset, shuffle=True)
    )


def _first(way: str, n: int) -> dict[str, float]:
    shard = _sharder(way)
    next(iter(shard(DataLoader(Numbers(1000), batch_size=BATCH, shuffle=True))))
    loader = DataLoader(Numbers(n), batch_size=BATCH, shuffle=True)
    before = _reset_peak()
    start = time.perf_counter()
    batches = iter(shard(loader))
    next(batches)
    return {"seconds": time.perf_counter() - start, "bytes": _kilobytes("VmHWM") * 1000.0 - before}


def _batches(ways: str, rounds: int) -> dict[str, list[float]]:
    steps = 1200  # many blocks, in which a shuffle is computed
    loader = DataLoader(Numbers(2 * BATCH * steps), batch_size=BATCH, shuffle=True)
    loaders = {"bare": DataLoader(Numbers(BATCH * steps), batch_size=BATCH, shuffle=True)}
    loaders |= {way: _sharder(way)(loader) for way in ways.split(",")}

    def an_epoch(each: Any) -> float:
        batches = iter(each)
        next(batches)  # whose cost is the epoch's
        start = time.perf_counter()
        for _ in itertools.islice(batches, steps - 100):
            pass
        return (time.perf_counter() - start) / (steps - 100)

    taken = in_turns({name: lambda each=each: an_epoch(each) for name, each in loaders.items()}, rounds)
    return {name: samples.seconds for name, samples in taken.items()}


def _resume(way: str, n: int) -> dict[str, float]:
    shard = _sharder(way)
    next(iter(shard(DataLoader(Numbers(1000), batch_size=BATCH, shuffle=True))))
    cut = shard(DataLoader(Numbers(n), batch_size=BATCH, shuffle=True))
    next(iter(cut))
    state = {**cut.state_dict(), "consumed": n // 2}
    loader = DataLoader(Numbers(n), batch_size=BATCH, shuffle=True)
    start = time.perf_counter()
    again = shard(loader)
    again.load_state_dict(state)
    next(iter(again))
    return {"seconds": time.perf_counter() - start}


def _reset_peak() -> float:
    """Reset the kernel's count of the process's peak memory, and return the present memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _kilobytes("VmRSS") * 1000.0


def _kilobytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def draw(firsts: dict[tuple[str, int], list[Figures]], sizes: list[int], path: str) -> None:
    """Draw time and memory to the first batch over the number of samples, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, pair = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axes, key, scale, label, goal, least in (
        (pair[0], "seconds", 1.0, "seconds to the first batch", FIRST_SECONDS, 0.0),
        (pair[1], "bytes", 1e-6, "MB more at the peak", FIRST_BYTES / 1e6, 0.1),
    ):
        for way in dict.fromkeys(way for way, _ in firsts):
            points = [(n, firsts[way, n]) for n in sizes if (way, n) in firsts]
            heights = [max(least, min(figures[key] for figures in taken) * scale) for _, taken in points]
            axes.plot([n for n, _ in points], heights, marker="o", label=way)
        axes.axhline(goal, color="black", linewidth=0.8, linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="samples", ylabel=label)
        axes.grid(alpha=0.3)
    pair[0].legend()
    figure.suptitle("Shuffled loader, rank 0 of 2 (dotted: the goal)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
