"""A newcomer's typical mistakes under distwrap, Accelerate and Lightning Fabric: silent, a hang, or an error?

One loop trains on two ranks, so that without a mistake its weights are those of plain torch in one process. Each
mistake is one line of it. Accelerate and Fabric run under torchrun, as both can; who is not installed is left out.

    python benchmarks/mistakes.py [--tools distwrap Accelerate Fabric] [--mistakes sum …] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from faults import end_all  # the file beside this one
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PATIENCE = 60.0  # seconds of a run; who has not ended then counts as hanging
BATCH = 8  # of a rank; both together take twice as much

# Each mistake in words, and the word of the cure that a message has to name: distwrap's, Accelerate's and Fabric's.
MISTAKES = {
    "none": ("no mistake", ("", "", "")),
    "model": ("the model is not wrapped", ("wrap_model", r"\bprepare", r"\bsetup")),
    "loader": ("the loader is not sharded", ("shard_loader", r"\bprepare", "setup_dataloaders")),
    "shuffled": ("the same, shuffled without a seed", ("shard_loader", r"\bprepare", "setup_data")),
    "batches": ("a rank has fewer batches", ("lockstep", "join_uneven_inputs", "join")),
    "break": ("a rank leaves the loop by its own loss", ("agree|lockstep", "trigger|reduce", "reduce")),
    "sum": ("the loss is a sum", ("mean", "mean", "mean")),
}
PROVEN = {"shuffled": "DW201", "sum": "DW102"}  # what a proof has to name, where a run cannot see it


def data() -> TensorDataset:
    torch.manual_seed(0)
    x = torch.randn(10 * BATCH, 4)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(10 * BATCH, 1))


def parts(mistake: str, rank: int, batch: int = BATCH) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """Return a model, its optimizer and a loader: this rank's own where the data are unequal, or nothing is sharded."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    samples: Any = data()
    if mistake == "batches":  # the files of each rank, of which one has fewer
        samples = torch.utils.data.Subset(samples, range(48) if rank == 0 else range(48, 80))
    if mistake == "shuffled":
        torch.seed()  # on each rank another one
    loader = DataLoader(samples, batch_size=batch, shuffle=mistake == "shuffled")
    return model, torch.optim.SGD(model.parameters(), lr=0.05), loader


def loss_of(mistake: str, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets, reduction="sum" if mistake == "sum" else "mean")


def leaves(mistake: str, loss: torch.Tensor) -> bool:
    """Return whether a rank stops early, as its own loss has it."""
    return mistake == "break" and loss.item() < 2.45


def plain(mistake: str) -> list[float]:
    """Return the weights that one process comes to with the batches of both ranks, and with the loss of a mistake."""
    model, optimizer, loader = parts("none", 0, 2 * BATCH)
    for x, y in loader:
        loss_of(mistake, model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def weights(model: nn.Module) -> list[float]:
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


def ended(rank: int, model: nn.Module, loss: float) -> None:
    """Note what a rank has come to; the loss is what the ranks together say."""
    Path(f"rank_{rank}.json").write_text(json.dumps({"weights": weights(model), "loss": loss}))


# The same loop three times, each as its documentation says.


def with_distwrap(mistake: str) -> None:
    from distwrap import distributed

    distributed(nprocs=2)(in_distwrap)(mistake)


def in_distwrap(mistake: str) -> None:
    from distwrap import mean, rank, shard_loader, wrap_model

    model, optimizer, loader = parts(mistake, rank())
    if mistake != "model":
        model = wrap_model(model)
    if mistake not in ("loader", "shuffled", "batches"):
        loader = shard_loader(loader)
    for x, y in loader:
        loss = loss_of(mistake, model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if leaves(mistake, loss):
            break
    ended(rank(), model, mean(loss.item(), len(x)))


def with_accelerate(mistake: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(mistake, accelerator.process_index)
    if mistake == "model":
        optimizer, loader = accelerator.prepare(optimizer, loader)
    elif mistake in ("loader", "shuffled", "batches"):
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = loss_of(mistake, model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if leaves(mistake, loss):
            break
    ended(accelerator.process_index, model, accelerator.reduce(loss, "mean").item())
    accelerator.end_training()


def with_fabric(mistake: str) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer, loader = parts(mistake, fabric.global_rank)
    if mistake == "model":
        optimizer = fabric.setup_optimizers(optimizer)
    else:
        model, optimizer = fabric.setup(model, optimizer)
    if mistake not in ("loader", "shuffled", "batches"):
        loader = fabric.setup_dataloaders(loader)
    for x, y in loader:
        loss = loss_of(mistake, model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if leaves(mistake, loss):
            break
    ended(fabric.global_rank, model, fabric.all_reduce(loss, reduce_op="mean").item())


def is_named(mistake: str) -> bool:
    """Return whether a proof names a mistake by its id."""
    from distwrap.errors import ProofError
    from distwrap.testing import prove

    try:
        prove(in_distwrap, mistake, ranks=[2])
    except ProofError as error:
        print(error)
        return mistake in PROVEN and PROVEN[mistake] in str(error)
    return False


TOOLS = {
    "distwrap": ("distwrap", with_distwrap),
    "Accelerate": ("accelerate", with_accelerate),
    "Fabric": ("lightning", with_fabric),
}


def try_out(tool: str, mistake: str) -> dict[str, Any]:
    """Make a mistake under a tool, and return what a user would see."""
    with tempfile.TemporaryDirectory(prefix="mistakes-") as name:
        folder = Path(name)
        command = [sys.executable, os.path.abspath(__file__), "--inside", tool, mistake]
        if tool != "distwrap":
            command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        began = time.time()
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, cwd=name, env=env)
        try:
            code: int | None = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.time() - began
        end_all(process)
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]
        text = (folder / "output").read_text(errors="replace")
    cure = MISTAKES[mistake][1][list(TOOLS).index(tool)]
    lines = [line for line in text.splitlines() if re.search(r"\w*(Error|Exception)\b.*: ", line)]
    right = plain(mistake)
    is_right = len(ranks) == 2 and all(torch.allclose(torch.tensor(r["weights"]), torch.tensor(right)) for r in ranks)
    if code is None:
        seen = "hangs"
    elif code:
        seen = "error with the cure" if re.search(cure, text) else "error"
    else:
        seen = "right" if is_right else "silent"
        if tool == "distwrap" and not is_right and is_named(mistake):
            seen = "silent, named by prove"
    return {
        "tool": tool,
        "mistake": mistake,
        "seen": seen,
        "seconds": seconds,
        "first error": lines[0] if lines else "",
        "ranks": ranks,
        "output": text[-4000:],
    }


def table(results: list[dict[str, Any]]) -> str:
    """Lay the results out with a row a mistake and a column a tool."""
    tools = list(dict.fromkeys(result["tool"] for result in results))
    lines = ["| mistake | " + " | ".join(tools) + " |", "|---" * (1 + len(tools)) + "|"]
    for mistake in dict.fromkeys(result["mistake"] for result in results):
        seen = [next(r["seen"] for r in results if (r["tool"], r["mistake"]) == (tool, mistake)) for tool in tools]
        lines.append(f"| {MISTAKES[mistake][0]} | " + " | ".join(seen) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--mistakes", nargs="*", default=list(MISTAKES), choices=list(MISTAKES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        tool, mistake = options.inside
        TOOLS[tool][1](mistake)
        return
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a caller leaves behind becomes ours (Linux)
    results = []
    for tool in options.tools:
        if find_spec(TOOLS[tool][0]) is None:
            print(f"{tool} is not installed, and left out.")
            continue
        for mistake in options.mistakes:
            results.append(try_out(tool, mistake))
            shown = {key: value for key, value in results[-1].items() if key != "output"}
            print(shown, flush=True)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
