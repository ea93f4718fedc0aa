"""Private names of torch by which several ranks can live in one process, each with groups and a device of its own.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh, distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from distwrap._internals.torch import replaced
from distwrap._internals.torch_autograd import batch_norm_of_all
from distwrap.errors import LaunchError

BACKEND = "simulated"
_TYPES = ("cuda", "xpu", "mps", "hpu", "npu")
_NAMES = ("device", "devices", "device_type", "map_location")  # of arguments that name devices
_LEFT_OUT = ("device_ids", "output_device", "device_id")
_BYTES = 1 << 34  # of a device that is not there

Answers = list[tuple[Any, str, Any]]


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


def _answering(answers: Sequence[tuple[Any, str, Any]], when: Callable[[], bool]) -> AbstractContextManager[None]:
    """Let functions be others within a ``with`` where a condition holds, and classes others.

    Args:
        answers: owners, names, and what answers there; a function gets the real one first.
        when: returns whether the caller is answered.
    """

    def answered(real: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            return answer(real, *args, **kwargs) if when() else real(*args, **kwargs)

        return answer if isinstance(answer, type) else call

    return replaced([(owner, name, answered(getattr(owner, name), answer)) for owner, name, answer in answers])


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
        said = {name.lower(): os.environ[name] for name in ("RANK", "WORLD_SIZE")} | dict(
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
        simulation.makers[id(module)] = simulation.rank()
        real(module, *args, **kwargs)

    answers: Answers = [
        (c10d, "_new_process_group_helper", make_group),
        (time, "sleep", lambda _, seconds: scheduler.sleep(seconds)),
        (os, "_exit", lambda _, code: scheduler.kill() if code else sys.exit()),
        (os, "kill", lambda real, *to: scheduler.kill() if to == (os.getpid(), signal.SIGKILL) else real(*to)),
        (signal, "signal", set_signal),
        *((nn.Module, name, make_module) for name in ("__init__", "__setstate__")),
        *((time, name, lambda now: now() + scheduler.slept) for name in ("monotonic", "time", "perf_counter")),
    ]
    with (
        _answering(answers, simulation.is_rank),
        mock.patch.dict(rendezvous._rendezvous_handlers, dict.fromkeys(("env", "tcp", "file"), meet)),
        torch.compiler.set_stance("force_eager"),
    ):
        isolate(True)
        try:
            yield
        finally:
            isolate(False)


class OneDevice(TorchFunctionMode):
    """Mode of a rank's thread in which each accelerator that a call names is the one device that there is.

    Relies on ``torch._C._nn:_parse_to``.
    Without it: ``module.to(0)`` of a simulated rank asks for a device that is not there.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.is_cpu = device, device.type == "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "cuda" or (self.is_cpu and name in ("xpu", "pin_memory")):
            return args[0].to(self.device)
        if self.is_cpu and name == "cpu":  # a copy, as of a device: later changes are not those of what was kept
            return args[0].clone()
        if name in ("to", "_parse_to"):
            first = int(name == "to")  # after the tensor itself
            args = (*args[:first], *map(self.of, args[first:]))
        kwargs = {key: self.of(value) if key == "device" else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)

    def of(self, value: Any) -> Any:
        """Return a value in which an accelerator's name or number, or a list of them, is the device of all ranks."""
        if isinstance(value, dict):  # of devices, for `torch.load`
            return lambda storage, _: storage
        if isinstance(value, (list, tuple, range)):
            return [self.device] * (len(value) > 0 and not self.is_cpu)
        if isinstance(value, str):
            return self.device.type if value.partition(":")[0] in _TYPES else value
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return self.device if is_number or getattr(value, "type", "") in _TYPES else value

    def renamed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that a mode does not see with the device of all ranks."""
        given = inspect.signature(real).bind(*args, **kwargs)
        named = {name: value for name, value in given.arguments.items() if name in (*_NAMES, *_LEFT_OUT)}
        given.arguments |= {name: self.of(value) if name in _NAMES else None for name, value in named.items()}
        return real(*given.args, **given.kwargs)


class _Nothing(nullcontext[Any]):
    """Stream, event or the like that does nothing: on the CPU all is done where it is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: {"elapsed_time": 0.0, "query": True}.get(name)


def _give(answer: Any, *_: Any, **__: Any) -> Any:
    return answer() if callable(answer) else answer


def _answers(ranks: int, rank: Callable[[], int], *, is_cpu: bool) -> dict[str, Any]:
    """Return what names of ``torch.cuda`` and ``torch.accelerator`` give: a value, what a function returns, or a class.

    On the CPU all other functions give nothing.
    """
    answers: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("current_device", "current_device_index", "current_device_idx"), rank),
        **dict.fromkeys(("set_device", "set_device_index", "set_device_idx")),
        "device_count": ranks,
        "current_accelerator": torch.device("cuda"),
        "get_device_name": "a simulated device",
        "get_device_capability": (8, 0),
        "device_index": _Nothing,
    }
    if is_cpu:
        answers |= dict.fromkeys(("stream", "current_stream", "default_stream"), _Nothing)
        answers |= dict.fromkeys(("mem_get_info", "get_memory_info"), (_BYTES, _BYTES))
        said = SimpleNamespace(name="a simulated device", total_memory=_BYTES, major=8, minor=0)
        answers |= {"get_device_properties": said, "memory_stats": Counter}
        # Classes that differ, since torch.compile keeps tables of them.
        answers |= {name: type(name, (_Nothing,), {}) for name in ("Stream", "Event", "device", "device_of")}
    return answers


@contextmanager
def answered_for_ranks(
    is_users: Callable[[str], bool], ranks: int, rank: Callable[[], int], mode: OneDevice
) -> Iterator[None]:
    """Answer the user's code within a ``with`` as if each rank had an accelerator of its own.

    torch's own code sees what is there; what a version of torch lacks is left out.

    Relies on ``torch.accelerator:current_device_index``, ``torch.nn.parallel:DistributedDataParallel.__init__``,
    ``torch.nn.parallel:DistributedDataParallel._passing_sync_batchnorm_handle``.
    Without it: a script that names what a version lacks fails as it would there.

    Args:
        is_users: returns whether a file is the user's own.
        ranks: their number, which is that of the devices.
        rank: returns the rank of this thread.
        mode: of the ranks' threads, with the device of all.
    """

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, mode.of(device))  # type: ignore[call-arg]

    ddp, nothing = nn.parallel.DistributedDataParallel, partial(_give, None)
    always: Answers = [(torch, "Generator", Generator), (torch.multiprocessing, "spawn", _refuse_spawn)]
    renamed: list[tuple[Any, str]] = [(torch, "load"), (torch, "set_default_device"), (torch.random, "fork_rng")]
    renamed += [(dist, "init_process_group"), (ddp, "__init__"), (device_mesh.DeviceMesh, "__init__")]
    always += [(owner, name, mode.renamed) for owner, name in renamed]
    if mode.is_cpu:  # whose parsers of arguments refuse our streams before a mode sees the call
        always += [(torch.Tensor, "record_stream", nothing), (nn.SyncBatchNorm, "forward", _normalize)]
        always += [(ddp, "_passing_sync_batchnorm_handle", nothing)]
        always += [(torch.cuda.nvtx, name, nothing) for name in ("range_push", "range_pop", "mark")]
    of_scripts: Answers = []
    answers = _answers(ranks, rank, is_cpu=mode.is_cpu)
    for module in (torch.cuda, torch.accelerator):
        for name, real in vars(module).items():
            # Graphs are refused by torch itself.
            is_plain = inspect.isroutine(real) and not name.startswith("_") and "graph" not in name
            if name in answers or (mode.is_cpu and is_plain):
                answer = answers.get(name, 0 if name.startswith(("memory_", "max_memory_")) else None)
                of_scripts.append((module, name, answer if inspect.isclass(real) else partial(_give, answer)))

    def asks() -> bool:
        return is_users(sys._getframe(2).f_code.co_filename)

    with warnings.catch_warnings(), _answering(always, lambda: True), _answering(of_scripts, asks):
        warnings.filterwarnings("ignore", "Attempted to get default timeout for nccl")
        yield


def _normalize(_: Any, self: Any, x: Any) -> Any:
    return batch_norm_of_all(self, x, self.process_group)


def _refuse_spawn(*_: Any, **__: Any) -> NoReturn:
    raise LaunchError(
        "a simulated rank cannot start ranks by torch.multiprocessing.spawn. Call the function that it starts from the "
        "script, as torchrun's ranks do, or simulate that function by distwrap.testing.simulate(fn, nprocs)."
    )
