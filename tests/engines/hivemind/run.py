"""A run of its own, which prints its global steps: with addresses of peers it joins them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import distwrap as dw
from distwrap import distributed
from distwrap.strategies.hivemind import global_steps
from tests.engines.hivemind.program import loss_of, made, strategy, train


def main(steps: int) -> float:
    """Train for so many global steps more, and return the loss."""
    model, optimizer = made()
    begun = global_steps(optimizer)
    for count in range(begun + 1, begun + steps + 1):
        if Path(os.environ["TMPDIR"], "stop").exists():
            break
        train(model, optimizer, count)
        if dw.rank() == 0:
            os.write(1, f"STEP {count}\n".encode())
    return loss_of(model)


if __name__ == "__main__":
    nprocs, steps, options = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    loss = distributed(strategy=strategy(2, **options), nprocs=nprocs, timeout=60)(main)(steps)
    os.write(1, f"LOSS {loss}\n".encode())
