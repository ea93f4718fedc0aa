"""Private names of DeepSpeed.

Each function says which name it relies on, and what happens without it; they were seen in version 0.19.8.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distwrap._internals.torch_calls import replaced


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep DeepSpeed from building its exchange through shared memory within a ``with``.

    Relies on ``deepspeed.comm.torch:build_shm_op``.
    Without it: each start on a CPU compiles for minutes.
    """
    with replaced([(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)]):
        yield


def forget_group() -> None:
    """Release DeepSpeed's reference to the process group when a run ends.

    Relies on ``deepspeed.comm.comm:cdb``.
    Without it: a second run in the same process exchanges over the group of the first.
    """
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    if comm is not None:
        comm.cdb = None
