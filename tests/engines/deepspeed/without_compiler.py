"""Run a script as it is, but for an operator that DeepSpeed would compile at its start: for minutes, and without need.

torchrun --nproc-per-node=2 without_compiler.py train.py WORDS …
"""

from __future__ import annotations

import runpy
import sys

import deepspeed

if __name__ == "__main__":
    exchange = sys.modules[f"{deepspeed.comm.__name__}.torch"]  # an attribute of that name is torch itself
    exchange.build_shm_op = lambda: None
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
