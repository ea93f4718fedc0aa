"""A strategy of your own: how the ranks meet, how a model is wrapped, and how it is saved.

    python examples/custom_strategy.py

Each method is optional. A package makes its strategy known without an import in the script, in its setup.cfg:

    [options.entry_points]
    distwrap.strategies =
        in_double = my_package:InDouble
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import torch
from torch import nn

from distwrap import (
    DDPStrategy,
    available_strategies,
    distributed,
    load,
    mean,
    rank,
    register_strategy,
    save,
    wrap_model,
    wrap_optimizer,
)


class Zipped:
    """torch's file, compressed."""

    collective = False  # rank 0 writes one file for all

    def save(self, state, path: Path) -> None:
        with gzip.open(path, "wb") as file:
            torch.save(state, file)

    def load(self, path: Path, map_location):
        with gzip.open(path, "rb") as file:
            return torch.load(file, map_location=map_location, weights_only=True)


class InDouble(DDPStrategy):
    """DDP over gloo, of models in double precision, saved in compressed files."""

    def __init__(self, *, clip: float = 1.0, **options) -> None:
        super().__init__(backend="gloo", **options)
        self.clip = clip

    def init_process_group(self, backend: str, **arguments) -> None:
        super().init_process_group(backend, **arguments)
        if arguments["rank"] == 0:
            print(f"{arguments['world_size']} ranks meet over {backend}", flush=True)

    def prepare_model(self, model: nn.Module, world, wrapping) -> nn.Module:
        return super().prepare_model(model.double(), world, wrapping)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, model) -> torch.optim.Optimizer:
        optimizer = super().prepare_optimizer(optimizer, model)  # which some algorithms of comm= exchange for theirs
        optimizer.register_step_pre_hook(self._clipped)
        return optimizer

    def _clipped(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(held, self.clip)

    def checkpoint_io(self) -> Zipped:
        return Zipped()


register_strategy("in_double", InDouble, "DDP in double precision, with clipping and compressed files", clip=0.5)


@distributed(nprocs=2, strategy="in_double", seed=0)
def main(steps: int, out: Path) -> float:
    model = wrap_model(nn.Linear(4, 1))
    optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    random = torch.Generator().manual_seed(rank())
    for _ in range(steps):
        x = torch.randn(32, 4, dtype=torch.float64, generator=random)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model, out)
    assert load(out)["weight"].dtype == torch.float64
    return mean(loss.item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train with a strategy of one's own.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("in_double.pt.gz"))
    args = parser.parse_args()
    print(f"in_double: {available_strategies()['in_double']}", flush=True)
    print(f"loss {main(args.steps, args.out):.6f}, model saved in {args.out.resolve()}")
