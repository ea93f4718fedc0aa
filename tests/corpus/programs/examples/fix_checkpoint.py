"""Repair a checkpoint whose keys begin with `module.` or `_orig_mod.`.

Without arguments, this makes such a checkpoint with real wrappers, shows that it does not load, repairs and loads it.
With two arguments, it repairs a file.

    python examples/fix_checkpoint.py
    python examples/fix_checkpoint.py broken.pt repaired.pt
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

from distwrap import load, save, strip_module_prefix


def repair(source: Path, target: Path) -> None:
    """Strip the checkpoint itself, or each state dict directly inside it."""
    state = load(source)
    if any(isinstance(value, torch.Tensor) for value in state.values()):
        state = strip_module_prefix(state)
    else:
        state = {name: strip_module_prefix(part) if _is_weights(part) else part for name, part in state.items()}
    save(state, target)


def _is_weights(part: object) -> bool:
    """Tell a model's state dict from an optimizer's, whose keys are "state" and "param_groups"."""
    return isinstance(part, dict) and bool(part) and all(isinstance(value, torch.Tensor) for value in part.values())


def demonstrate(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    wrapped = torch.compile(nn.DataParallel(model))
    torch.save({"model": wrapped.state_dict(), "epoch": 3}, folder / "broken.pt")
    print("saved:   ", ", ".join(load(folder / "broken.pt")["model"]))

    fresh = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    try:
        fresh.load_state_dict(load(folder / "broken.pt")["model"])
    except RuntimeError as error:
        print("loading: ", str(error).splitlines()[1].strip())

    repair(folder / "broken.pt", folder / "repaired.pt")
    repaired = load(folder / "repaired.pt")["model"]
    print("repaired:", ", ".join(repaired))
    print("loading: ", fresh.load_state_dict(repaired))
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Repair the keys of a checkpoint.")
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("target", type=Path, nargs="?")
    args = parser.parse_args()
    if args.source is None:
        with tempfile.TemporaryDirectory() as folder:
            demonstrate(Path(folder))
    elif args.target is None:
        parser.error("say where to write the repaired checkpoint: IN OUT")
    else:
        repair(args.source, args.target)
        print(f"repaired checkpoint written to {args.target.resolve()}")
