"""Private names of cloudpickle, Hugging Face's datasets, DeepSpeed and hivemind.

Every function says which names it relies on, and what happens without them; all were seen in versions 3.0 to 3.1 of
cloudpickle, 5.2 of datasets, 0.19.8 of DeepSpeed and 1.1.12 of hivemind.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distwrap._internals.torch import replaced
from distwrap.errors import LoaderError


def tracker_of(cls: type) -> str | None:
    """Return the name under which cloudpickle knows a class in every process, or ``None``.

    Relies on ``cloudpickle.cloudpickle:_DYNAMIC_CLASS_TRACKER_BY_CLASS``.
    Without it: the caller gets its own class back as an equal one, which ``except`` does not recognise.
    """
    from cloudpickle import cloudpickle

    tracker: str | None = getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {}).get(cls)
    return tracker


def class_of(tracker: str) -> type:
    """Return the class with a name of `tracker_of`.

    Relies on ``cloudpickle.cloudpickle:_DYNAMIC_CLASS_TRACKER_BY_ID``.
    Without it: unpickling the class raises AttributeError.

    Raises:
        AttributeError: cloudpickle has no class with this name.
    """
    from cloudpickle import cloudpickle

    cls: type | None = getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {}).get(tracker)
    if cls is None:
        raise AttributeError(f"cloudpickle knows no class under {tracker!r}")
    return cls


def is_split_by_node(dataset: Any) -> bool:
    """Return whether an IterableDataset was divided by ``split_dataset_by_node``.

    Relies on ``datasets:Dataset.from_dict({"x": [1]}).to_iterable_dataset()._distributed``.
    Without it: LoaderError, since a dataset that is divided twice would lose samples.

    Raises:
        LoaderError: this version of datasets does not tell.
    """
    if not hasattr(dataset, "_distributed"):
        raise LoaderError(
            "this version of datasets does not tell whether split_dataset_by_node() has divided the dataset. Divide it "
            "yourself, and say shard_loader(loader, split='dataset')."
        )
    return dataset._distributed is not None


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


def put_sockets_in(prefix: str) -> str:
    """Let hivemind's processes make their sockets under a path prefix, as ``"/unix/tmp/mine-"``.

    Relies on ``hivemind.p2p:P2P()._UNIX_SOCKET_PREFIX``.
    Without it: sockets are in /tmp, and those of a killed rank stay there.

    Returns:
        The previous prefix.
    """
    from hivemind.p2p import P2P

    kind: Any = P2P
    before = str(getattr(kind, "_UNIX_SOCKET_PREFIX", prefix))
    kind._UNIX_SOCKET_PREFIX = prefix
    return before
