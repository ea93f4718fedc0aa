"""What differs between the versions of torch and of Python; nothing else in the package compares versions.

Each name says what a version does or needs, and the comment above it since when. What distwrap does alike on every
version has no entry here, and the private names, each with what happens without it, are in `_internals`.
"""

from __future__ import annotations

import sys

import torch

from distwrap.errors import OptionError

TORCH = str(torch.__version__)
TORCH_RELEASE = tuple(int(number) for number in TORCH.split(".")[:2])
# The versions whose private names have been looked at; setup.cfg has the oldest one, and
# docs/reference/versions.md what was run.
TORCH_SEEN = "2.6 to 2.15"


# What strategies need: the first version of torch that has it.
PIPELINE_SINCE = (2, 8)
FSDP_ON_CPU_SINCE = (2, 8)
MODEL_PARALLEL_SINCE = (2, 13)


# Since 2.8 the end of a process group lets Python's lock go. Before, it waits with the lock for a thread of gloo's that
# may wait for that lock.
ENDS_GROUPS_LOCKED = TORCH_RELEASE < (2, 8)

# Since 2.8 a store can be cloned: a second client, beside the one on which another thread may wait.
STORES_CLONE = TORCH_RELEASE >= (2, 8)

# Since 2.8 the usual server of a store takes over a socket that listens already; the older server always did.
SERVERS_TAKE_SOCKETS = TORCH_RELEASE >= (2, 8)

# Since 2.9 the question which accelerator torch is built for does not start the accelerator's driver.
ASKS_WITHOUT_DRIVER = TORCH_RELEASE >= (2, 9)

# Since 2.8 the context that keeps the counts of changes of tensors takes many of them at once.
KEEPS_COUNTS_OF_MANY = TORCH_RELEASE >= (2, 8)

# Since 2.15 FSDP accumulates gradients in the gathered parameter alone; the other name for them cannot be set.
ACCUMULATES_BESIDE_PARAMETERS = TORCH_RELEASE < (2, 15)

# Options of DDP by which the user decides when buffers are broadcast; the second name came with 2.13.
DDP_BROADCAST_OPTIONS = {"broadcast_buffers", "forward_sync_buffers"}

# Optimizers whose step looks at a weight as a whole matrix; Muon came with 2.9.
MATRIX_OPTIMIZERS: tuple[type[torch.optim.Optimizer], ...] = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
)


# Before Python 3.12 a look at another thread's frames may begin a collection of garbage, which may lock the interpreter
# for good or crash it. Source: https://github.com/python/cpython/issues/106883
LOOKS_COLLECT_GARBAGE = sys.version_info < (3, 12)

# Frames between a method `log` that calls logging's own adapter and the look for the caller's line: Python 3.11 has
# left one of them out.
FRAMES_OF_ADAPTER = 2 if sys.version_info < (3, 11) else 1

# Since Python 3.13 ``@classmethod`` passes the class to what it wraps, and lets it bind itself to the class no more.
# Source: https://docs.python.org/3/whatsnew/3.13.html#builtins
CLASS_METHODS_DO_NOT_BIND = sys.version_info >= (3, 13)


def require_torch(what: str, least: tuple[int, int], why: str, otherwise: str) -> None:
    """Refuse an older version of torch.

    Args:
        what: needs the version.
        least: the first version that has it.
        why: what an older one lacks.
        otherwise: what can be used with this version.

    Raises:
        OptionError: this torch is older.
    """
    if least > TORCH_RELEASE:
        raise OptionError(
            f"{what} needs torch {least[0]}.{least[1]} or newer, and this is {TORCH}: before, {why}. "
            f"Install a newer torch, or use {otherwise}."
        )
