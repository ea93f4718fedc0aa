"""What distwrap costs on an accelerator: one rank of its backend (NCCL on a GPU), beside plain torch and torch's DDP.

In a process group of one rank, in turns; the device has done all that it was given when a clock is read.

    python benchmarks/gpu.py [--quick] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from command_line import arguments
from samples import in_turns
from table import Row, report
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.comm.compressed import Cast, MinMax8, Sign

SMALL, LARGE = (256, 2), (4096, 6)  # width and number of layers: 0.1 and 100 million numbers


def main() -> None:
    args = arguments(__doc__)
    rounds, calls = (2, 2) if args.short else (15, 20)
    rows = []
    with one_rank():
        for shape, name in ((SMALL, "0.1 M"), (LARGE, "100 M")):
            rows += model_rows(name, SMALL if args.quick else shape, rounds, calls)
        rows += [loader_row(rounds, args.quick), *codec_rows(10**4 if args.quick else 10**8, rounds, calls)]
        with tempfile.TemporaryDirectory() as folder:
            rows.append(save_row(Path(folder), 1 if args.quick else 256, min(rounds, 5)))
    rows.append(launch_row(min(rounds, 5)))
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else dw.device().type
    report(f"gpu: {where}, torch {torch.__version__}", rows, [], args)


@contextmanager
def one_rank() -> Iterator[None]:
    """Be the one rank of a process group, as under torchrun."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place, MASTER_PORT="29511")
    try:
        with dw.setup_process_group():
            yield
    finally:
        for name in (*place, "MASTER_PORT"):
            os.environ.pop(name, None)


def finish() -> None:
    if dw.device().type != "cpu":
        torch.accelerator.synchronize()


def timed(fn: Callable[[], object], calls: int) -> Callable[[], float]:
    """Return the seconds of one of several calls, with all that the device does for them."""

    def way() -> float:
        finish()
        begun = time.perf_counter()
        for _ in range(calls):
            fn()
        finish()
        return (time.perf_counter() - begun) / calls

    return way


def model_rows(name: str, shape: tuple[int, int], rounds: int, calls: int) -> list[Row]:
    """Time a forward without gradients and a step of a stack of layers, three ways."""
    width, layers = shape
    plain = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(dw.device())
    x = torch.randn(64, width, device=dw.device())
    models = {
        "plain": plain,
        "DDP": DistributedDataParallel(copy.deepcopy(plain)),
        "distwrap": dw.wrap_model(copy.deepcopy(plain)),
    }
    forwards, steps = {}, {}
    for way, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        forwards[way], steps[way] = timed(torch.no_grad()(lambda model=model: model(x)), calls), timed(step, calls)
    rows = []
    for what, ways in (("forward", forwards), ("step", steps)):
        for way in ways.values():
            way()  # the first one makes buckets, streams and memory
        taken = in_turns(ways, rounds)
        for other in ("DDP", "plain"):
            figure = f"{taken['distwrap'].over(taken[other]):.3f} times"
            rows.append(Row(f"{what}, {name}: distwrap | {other}", taken["distwrap"], taken[other], "us", figure))
    return rows


def loader_row(rounds: int, quick: bool) -> Row:
    """Time an epoch of batches from pinned memory, each of which is used for as long as its copy takes."""
    data = TensorDataset(torch.randn(64, 2**8 if quick else 2**19))
    weight = torch.randn(data.tensors[0].shape[1], device=dw.device())
    pinned = dw.device().type != "cpu"

    def epoch(loader: Any) -> None:
        for (batch,) in loader:
            for _ in range(8):
                batch.to(dw.device(), non_blocking=True) @ weight

    plain = DataLoader(data, batch_size=16, pin_memory=pinned)
    ahead = dw.shard_loader(DataLoader(data, batch_size=16, pin_memory=pinned), copy_ahead=True)
    taken = in_turns({"ours": timed(lambda: epoch(ahead), 1), "plain": timed(lambda: epoch(plain), 1)}, rounds)
    figure = f"{taken['ours'].over(taken['plain']):.2f} times"
    return Row("an epoch, pinned: copy_ahead | .to(non_blocking)", taken["ours"], taken["plain"], "ms", figure)


def codec_rows(count: int, rounds: int, calls: int) -> list[Row]:
    """Time encoding beside a copy of the same memory."""
    x = torch.randn(count, device=dw.device())
    rows = []
    for name, codec in {"bfloat16": Cast(torch.bfloat16), "min-max, 8 bits": MinMax8(), "sign, 1 bit": Sign()}.items():
        codes = torch.empty(codec.size(count), dtype=torch.uint8, device=dw.device())
        ways = {
            "encode": timed(lambda codec=codec, codes=codes: codec.encode(x, codes), calls),
            "copy": timed(lambda: x.clone(), calls),
        }
        ways["encode"]()
        taken = in_turns(ways, rounds)
        figure = f"{taken['encode'].over(taken['copy']):.2f} times"
        rows.append(Row(f"{name}: encode | copy", taken["encode"], taken["copy"], "ms", figure))
    return rows


def save_row(folder: Path, megabytes: int, rounds: int) -> Row:
    """Time for which a save keeps a loop waiting."""
    state = {f"{number}": torch.randn(2**20, device=dw.device()) for number in range(megabytes // 4 + 1)}

    def background() -> float:
        seconds = timed(lambda: dw.save(state, folder / "ours.pt", background=True), 1)()
        dw.wait_for_saves()
        return seconds

    background()
    ways = {"ours": background, "torch.save": timed(lambda: torch.save(state, folder / "torch.pt"), 1)}
    taken = in_turns(ways, rounds)
    figure = f"{100 * taken['ours'].over(taken['torch.save']):.1f} %"
    return Row("blocking: save(background=True) | torch.save", taken["ours"], taken["torch.save"], "ms", figure)


def _nothing(_: int = 0) -> None:
    pass


def launch_row(rounds: int) -> Row:
    """Time a launch of two ranks that share the device, after this process has used it; spawn forms no group."""
    torch.ones(1, device=dw.device())
    ours = dw.distributed(nprocs=2, share_devices=True)(_nothing)
    ours()  # starts the fork server
    taken = in_turns({"ours": timed(ours, 1), "spawn": timed(lambda: mp.spawn(_nothing, nprocs=2), 1)}, rounds)
    figure = f"{taken['spawn'].over(taken['ours']):.1f} times faster"
    return Row("launch after the device was used: forkserver | spawn", taken["ours"], taken["spawn"], "ms", figure)


if __name__ == "__main__":
    main()
