"""Private names of torch by which several ranks can live in one process, each with groups of its own.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any
from unittest import mock
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from distwrap._internals.torch import replaced

BACKEND = "simulated"


def group_tables() -> list[tuple[Any, str]]:
    """Return the module and names of the tables in which torch keeps a process's groups.

    Relies on ``torch.distributed.distributed_c10d:_world``, ``torch.distributed.distributed_c10d:_pg_map``,
    ``torch.distributed.distributed_c10d:_pg_names``, ``torch.distributed.distributed_c10d:_pg_group_ranks``,
    ``torch.distributed.distributed_c10d:_pg_backend_config``, ``torch.distributed.distributed_c10d:_group_count``,
    ``torch.distributed.distributed_c10d:_tags_to_pg``, ``torch.distributed.distributed_c10d:_pg_to_tag``.
    Without it: ranks cannot be simulated.
    """
    tables = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
    return [(c10d, name) for name in ("_world", "_group_count", *tables)]


def hook_tables() -> list[tuple[Any, str]]:
    """Return the modules and names of torch's tables of hooks of all optimizers and all modules of a process.

    Relies on ``torch.optim.optimizer:_global_optimizer_pre_hooks``,
    ``torch.nn.modules.module:_global_forward_pre_hooks``, and the like in both.
    Without it: such hooks of one simulated rank are called in the steps of all.
    """
    modules = [import_module(name) for name in ("torch.optim.optimizer", "torch.nn.modules.module")]
    names = [(module, name) for module in modules for name in vars(module) if name.startswith("_global_")]
    return [(module, name) for module, name in names if isinstance(getattr(module, name), dict)]


@contextmanager
def answering(answers: Sequence[tuple[Any, str, Callable[..., Any]]], when: Callable[[], bool]) -> Iterator[None]:
    """Let functions be others within a ``with`` where a condition holds, and classes others.

    Args:
        answers: owners, names, and what answers there; a function gets the real one first.
        when: returns whether the caller is answered.
    """

    def answered(real: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(answer, type):
            return answer

        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            return answer(real, *args, **kwargs) if when() else real(*args, **kwargs)

        return call

    with replaced([(owner, name, answered(getattr(owner, name), answer)) for owner, name, answer in answers]):
        yield


@contextmanager
def simulated_torch(simulation: Any, store: Any) -> Iterator[None]:
    """Let torch make simulated groups within a ``with``, whatever backend a rank names, and let ranks' time be ours.

    ``time.sleep`` and the clocks of `time` are replaced for the ranks' threads: a rank that looks for a file again and
    again would else never give up its turn. So are ``signal.signal``, which Python refuses outside of the main thread,
    and ``os._exit`` and SIGKILL, with which a rank dies.
    Modules are noted where they are made, copied or unpickled, to know which rank's they are. Nothing is compiled:
    ranks would share what was compiled for the first.

    Relies on ``torch.distributed.distributed_c10d:_new_process_group_helper``,
    ``torch.distributed.rendezvous:_rendezvous_handlers``,
    ``torch._C._distributed_c10d:_set_thread_isolation_mode``, ``torch.nn:Module.__setstate__``.
    Without it: ranks cannot be simulated.

    Args:
        simulation: of the ranks.
        store: the one in which they meet.
    """
    rendezvous: Any = import_module("torch.distributed.rendezvous")  # the package has a function of this name
    isolate: Callable[[bool], None] = getattr(torch._C._distributed_c10d, "_set_thread_isolation_mode")  # noqa: B009
    scheduler, simulated = simulation.scheduler, dist.Backend(BACKEND)

    def meet(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
        said = {name: os.environ[name.upper()] for name in ("rank", "world_size")} | dict(
            parse_qsl(urlparse(url).query)
        )
        yield store, int(said["rank"]), int(said["world_size"])

    def make_group(real: Any, size: Any, rank: Any, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(dict.fromkeys({"device_id", "pg_options", "backend_options"} & kwargs.keys()))
        group, prefixed = real(size, rank, ranks, simulated, *args, **kwargs)
        if prefixed is not None:
            named = dist.Backend(str(backend))
            c10d._world.pg_map[group] = (named, prefixed)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(named))
        return group, prefixed

    def set_signal(real: Any, number: Any, handler: Any) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        return real(number, handler) if is_main else signal.getsignal(number)

    def make_module(real: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        simulation.note_maker(module)
        real(module, *args, **kwargs)

    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        (c10d, "_new_process_group_helper", make_group),
        (time, "sleep", lambda _, seconds: scheduler.sleep(seconds)),
        (os, "_exit", lambda *_: scheduler.kill()),
        (os, "kill", lambda real, *to: scheduler.kill() if to == (os.getpid(), signal.SIGKILL) else real(*to)),
        (signal, "signal", set_signal),
        *((nn.Module, name, make_module) for name in ("__init__", "__setstate__")),
        *((time, name, lambda now: now() + scheduler.slept) for name in ("monotonic", "time", "perf_counter")),
    ]
    handlers = dict.fromkeys(("env", "tcp", "file"), meet)
    with (
        answering(answers, simulation.is_rank),
        mock.patch.dict(rendezvous._rendezvous_handlers, handlers),
        torch.compiler.set_stance("force_eager"),
    ):
        isolate(True)
        try:
            yield
        finally:
            isolate(False)
