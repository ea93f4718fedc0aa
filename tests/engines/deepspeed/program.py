"""A script that trains under stage 3 and saves the weights, whichever launcher has started it."""

from __future__ import annotations

import sys

import distwrap as dw
from distwrap import distributed
from tests.engines.deepspeed.test_deepspeed import adamw, net, trained


@distributed(strategy="deepspeed(stage=3)", timeout=60)
def main(path: str) -> None:
    """Train, and save."""
    model = dw.wrap_model(net())
    trained(model, adamw(model))
    dw.save({"model": model, "source": dw.placement().source}, path)


if __name__ == "__main__":
    main(sys.argv[1])
