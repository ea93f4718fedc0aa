"""Private names of torch by which several ranks can live in one process, each with groups of its own.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

BACKEND = "simulated"


_World: type[Any] = getattr(c10d, "_World", object)


class GroupsOfRank(_World):  # type: ignore[misc]
    """Process groups of one simulated rank, which torch keeps for the process.

    Relies on ``torch.distributed.distributed_c10d:_World``.
    Without it: ranks cannot be simulated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[str, dict[Any, Any]] = {}
        self._made = 0

    def _table(self, name: str) -> dict[Any, Any]:
        return self._own.setdefault(name, {})

    pg_map = property(lambda self: self._table("map"))
    pg_names = property(lambda self: self._table("names"))
    pg_group_ranks = property(lambda self: self._table("ranks"))
    pg_backend_config = property(lambda self: self._table("config"))
    tags_to_pg = property(lambda self: self._table("tags"))
    pg_to_tag = property(lambda self: self._table("tag"))

    @property
    def group_count(self) -> int:
        """The number of groups made, by which torch names the next."""
        return self._made

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._made = value


def hook_tables() -> list[tuple[ModuleType, str]]:
    """Return the modules and names of torch's tables of hooks of all optimizers and all modules of a process.

    Relies on ``torch.optim.optimizer:_global_optimizer_pre_hooks``,
    ``torch.nn.modules.module:_global_forward_pre_hooks``, and the like in both.
    Without it: such hooks of one simulated rank are called in the steps of all.
    """
    modules = [import_module(name) for name in ("torch.optim.optimizer", "torch.nn.modules.module")]
    return [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("_global_") and isinstance(value, dict)
    ]


def groups_of_process() -> Any:
    """Return torch's table of this process's groups.

    Relies on ``torch.distributed.distributed_c10d:_world``.
    Without it: ranks cannot be simulated.
    """
    return c10d._world


def set_groups_of_process(groups: Any) -> None:
    """Make a table of groups the process's.

    Relies on ``torch.distributed.distributed_c10d:_world``.
    Without it: ranks cannot be simulated.
    """
    c10d._world = groups


@contextmanager
def simulated_torch(
    open_store: Callable[[], dist.Store],  # type: ignore[name-defined]
    is_simulated: Callable[[], bool],
    sleep: Callable[[float], None],
    slept: Callable[[], float],
) -> Iterator[None]:
    """Let torch make simulated groups within a ``with``, whatever backend a rank names, and let ranks' time be ours.

    ``time.sleep`` and the clocks of `time` are replaced for the ranks' threads: a rank that looks for a file again and
    again would else never give up its turn. So is ``signal.signal``, which Python refuses outside of the main thread.
    Nothing is compiled: ranks would share what was compiled for the first.

    Relies on ``torch.distributed.distributed_c10d:_new_process_group_helper``,
    ``torch.distributed.rendezvous:_rendezvous_handlers``,
    ``torch._C._distributed_c10d:_set_thread_isolation_mode``.
    Without it: ranks cannot be simulated.

    Args:
        open_store: returns the store of the simulated ranks.
        is_simulated: returns whether this thread is one of a simulated rank.
        sleep: the ranks' ``time.sleep``.
        slept: returns the seconds by which their clocks are ahead.
    """
    rendezvous: Any = import_module("torch.distributed.rendezvous")  # the package has a function of this name
    groups_of_torch: Any = c10d
    isolate: Callable[[bool], None] = getattr(torch._C._distributed_c10d, "_set_thread_isolation_mode")  # noqa: B009
    handlers, helper = dict(rendezvous._rendezvous_handlers), groups_of_torch._new_process_group_helper
    real_sleep, real_signal = time.sleep, signal.signal
    clocks = {name: getattr(time, name) for name in ("monotonic", "time", "perf_counter")}

    def meet(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
        rank, size = _rank_and_size(url)
        yield open_store(), rank, size

    def make_group(size: Any, rank: Any, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(dict.fromkeys({"device_id", "pg_options", "backend_options"} & kwargs.keys()))
        group, store = helper(size, rank, ranks, dist.Backend(BACKEND), *args, **kwargs)
        if store is not None:
            groups = groups_of_process()
            groups.pg_map[group] = (dist.Backend(str(backend)), store)
            groups.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(str(backend))))
        return group, store

    rendezvous._rendezvous_handlers.update(dict.fromkeys(("env", "tcp", "file"), meet))
    groups_of_torch._new_process_group_helper = make_group
    dist.Backend.backend_list.append(BACKEND)
    time.sleep = lambda seconds, /: sleep(float(seconds)) if is_simulated() else real_sleep(seconds)
    for name, clock in clocks.items():
        setattr(time, name, partial(_ahead, clock, is_simulated, slept))
    signals: Any = signal
    signals.signal = partial(_set_signal, real_signal, is_simulated)
    isolate(True)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        isolate(False)
        time.sleep, signal.signal = real_sleep, real_signal
        for name, clock in clocks.items():
            setattr(time, name, clock)
        groups_of_torch._new_process_group_helper = helper
        dist.Backend.backend_list.remove(BACKEND)
        rendezvous._rendezvous_handlers.clear()
        rendezvous._rendezvous_handlers.update(handlers)


def _ahead(clock: Callable[[], float], is_simulated: Callable[[], bool], slept: Callable[[], float]) -> float:
    return clock() + slept() if is_simulated() else clock()


def _set_signal(real: Callable[..., Any], is_simulated: Callable[[], bool], number: Any, handler: Any) -> Any:
    in_main = threading.current_thread() is threading.main_thread()
    return real(number, handler) if in_main or not is_simulated() else signal.getsignal(number)


def _rank_and_size(url: str) -> tuple[int, int]:
    """Return what a rendezvous URL, or else the environment, says.

    Example:
        >>> _rank_and_size("tcp://127.0.0.1:29500?rank=1&world_size=2")
        (1, 2)
    """
    import os
    from urllib.parse import parse_qs, urlparse

    said = parse_qs(urlparse(url).query)
    rank = int(said["rank"][0]) if "rank" in said else int(os.environ["RANK"])
    return rank, int(said["world_size"][0]) if "world_size" in said else int(os.environ["WORLD_SIZE"])
