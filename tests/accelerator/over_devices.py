"""A script that trains under ddp2, one process a node over all its devices; run by torchrun on each of two nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import distwrap as dw
from distwrap.devices.selection import visible_devices
from tests.accelerator.test_equality import STEPS, data
from tests.accelerator.test_over_devices import Seeing


@dw.distributed(strategy="ddp2", timeout=60)
def main(folder: str, comm: str) -> None:
    inner = Seeing()
    model = dw.wrap_model(inner, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = (part.to(dw.device()) for part in data(step, dw.rank()))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]
    seen = [dw.world_size(), visible_devices().count, len(inner.seen) == visible_devices().count]
    Path(folder, f"{dw.rank()}.json").write_text(json.dumps([weights, seen]))


if __name__ == "__main__":
    main(*sys.argv[1:])
