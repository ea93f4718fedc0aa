"""A user's script, the same under every launcher: trains, and tells what each rank was and what came out.

Usage: job.py [the epochs] [the machine's failure], with the options from the environment.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, gather_object, placement, save, shard_loader, wrap_model
from distwrap.launch import peer_launchers
from distwrap.network import connectivity

SAMPLES = 48


def data() -> TensorDataset:
    """A line with noise, the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 4, generator=generator)
    return TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]) + 0.1)


def tell(**what: object) -> None:
    """Print a line in one piece."""
    os.write(1, f"TOLD {json.dumps(what)}\n".encode())


def fail_if_asked(epoch: int, rank: int) -> None:
    """Fail as the environment asks: ``raise@1,die@2`` in epoch 1 of the first attempt, and in epoch 2 of the second."""
    failures = os.environ.get("JOB_FAILS", "").split(",")
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    kind, _, when = failures[min(attempt, len(failures) - 1)].partition("@")
    if not kind or int(when) != epoch or (attempt >= len(failures) and kind != "always"):
        return
    if kind in ("raise", "always") and rank == 1:
        raise ValueError(f"rank {rank} stumbles in epoch {epoch}")
    if kind == "die" and rank == 1:
        os.kill(os.getpid(), 9)


def slow_down_if_asked(world_size: int) -> None:
    """Sleep for as long as the environment asks, with ``0.4@2`` only in a world of two ranks."""
    seconds, _, ranks = os.environ.get("JOB_SLOW", "").partition("@")
    if seconds and (not ranks or int(ranks) == world_size):
        distwrap.barrier()
        time.sleep(float(seconds))


def weights_of(model: nn.Module) -> list[float]:
    """Return all weights of a model, one after the other."""
    weights: list[float] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return weights


@distributed(seed=0, timeout=60)
def main(epochs: int, path: str | None) -> list[float]:
    """Train a linear model, from where an earlier run has stopped; return the weights."""
    model = wrap_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = shard_loader(DataLoader(data(), batch_size=12, shuffle=False), mode="exact", batch_size="global")
    first = 0
    if path is not None:
        state = distwrap.resume_from(path)
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["epoch"] + 1
    place = placement()
    tell(
        start=place.rank,
        first=first,
        place=vars(place),
        host=os.uname().nodename,
        interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        threads=torch.get_num_threads(),
    )
    for epoch in range(first, epochs):
        fail_if_asked(epoch, place.rank)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if path is not None:
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
        tell(epoch=epoch, rank=place.rank)
        if "JOB_TELLS_WEIGHTS" in os.environ:
            tell(weights=weights_of(model))
        slow_down_if_asked(place.world_size)
    weights = weights_of(model)
    assert all(other == weights for other in gather_object(weights))
    return weights


if __name__ == "__main__":
    peer_launchers.LOST_SECONDS = float(os.environ.get("JOB_LOST", peer_launchers.LOST_SECONDS))
    connectivity.REPLY_SECONDS = float(os.environ.get("JOB_REPLY", connectivity.REPLY_SECONDS))
    value = main(int(sys.argv[1]) if len(sys.argv) > 1 else 3, sys.argv[2] if len(sys.argv) > 2 else None)
    tell(value=value if isinstance(value, list) else str(value))
