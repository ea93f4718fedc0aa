"""Functions of torch that name accelerators, answered for simulated ranks: the script sees as many devices as ranks.

torch's own code sees what is there. Each rank's tensors are on the one device that there is: the first accelerator, or
the CPU. All were seen in versions 2.6 to 2.15; what a version lacks is left out.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.nn import functional
from torch.overrides import TorchFunctionMode

from distwrap._internals.torch_simulation import answering
from distwrap.errors import LaunchError

_TYPES = ("cuda", "xpu", "mps", "hpu", "npu")
_BYTES = 1 << 34  # of a device that is not there


class OneDevice(TorchFunctionMode):
    """Mode of a rank's thread in which each accelerator that a call names is the one device that there is.

    Relies on ``torch._C._nn:_parse_to``.
    Without it: ``module.to(0)`` of a simulated rank asks for a device that is not there.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.is_cpu = device, device.type == "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "cuda" or (self.is_cpu and name in ("xpu", "pin_memory")):
            return args[0].to(self.device)
        if self.is_cpu and name == "is_pinned":
            return None
        if self.is_cpu and name == "cpu":  # a copy, as of a device: later changes are not those of what was kept
            return args[0].clone()
        if name in ("to", "_parse_to"):
            first = int(name == "to")  # after the tensor itself
            args = (*args[:first], *map(self.of, args[first:]))
        if kwargs.get("device") is not None:
            kwargs["device"] = self.of(kwargs["device"])
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


class _Nothing(contextlib.nullcontext[Any]):
    """Stream, event or the like that does nothing: on the CPU all is done where it is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: {"elapsed_time": 0.0, "query": True}.get(name)


def _give(answer: Any, *_: Any, **__: Any) -> Any:
    return answer() if callable(answer) else answer


_do_nothing = partial(_give, None)


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


@contextlib.contextmanager
def answered_for_ranks(
    is_users: Callable[[str], bool], ranks: int, rank: Callable[[], int], mode: OneDevice
) -> Iterator[None]:
    """Answer the user's code within a ``with`` as if each rank had an accelerator of its own.

    Relies on ``torch.accelerator:current_device_index``, ``torch.nn.parallel:DistributedDataParallel.__init__``,
    ``torch.nn.parallel:DistributedDataParallel._passing_sync_batchnorm_handle``.
    Without it: a script that names what a version lacks fails as it would there.

    Args:
        is_users: returns whether a file is the user's own.
        ranks: their number, which is that of the devices.
        rank: returns the rank of this thread.
        mode: of the ranks' threads, with the device of all.
    """

    def rename(real: Any, *args: Any, **kwargs: Any) -> Any:
        return real(*map(mode.of, args), **{key: mode.of(value) for key, value in kwargs.items()})

    def make_mesh(real: Any, mesh: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        real(mesh, mode.of(device_type), *args, **kwargs)

    def make_ddp(
        real: Any, ddp: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        real(ddp, module, None, None, *args, **kwargs)

    def init_process_group(real: Any, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        warnings.filterwarnings("ignore", "Attempted to get default timeout for nccl")
        real(*args, **kwargs)

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, mode.of(device))  # type: ignore[call-arg]

    ddp = nn.parallel.DistributedDataParallel
    always: list[tuple[Any, str, Any]] = [
        (torch, "Generator", Generator),
        (torch.multiprocessing, "spawn", _refuse_spawn),
        (dist, "init_process_group", init_process_group),
        (ddp, "__init__", make_ddp),
        (torch, "load", rename),
        (torch, "set_default_device", rename),
        (torch.random, "fork_rng", rename),  # which torch's pipelines call too
        (device_mesh.DeviceMesh, "__init__", make_mesh),
    ]
    if mode.is_cpu:  # whose parsers of arguments refuse our streams before a mode sees the call
        always += [(torch.Tensor, "record_stream", _do_nothing), (nn.SyncBatchNorm, "forward", _normalize)]
        always += [(ddp, "_passing_sync_batchnorm_handle", _do_nothing)]
        always += [(torch.cuda.nvtx, name, _do_nothing) for name in ("range_push", "range_pop", "mark")]
    of_scripts: list[tuple[Any, str, Any]] = []
    answers = _answers(ranks, rank, is_cpu=mode.is_cpu)
    for module in (torch.cuda, torch.accelerator):
        for name, real in vars(module).items():
            # Graphs are refused by torch itself.
            if name in answers or (mode.is_cpu and inspect.isroutine(real) and not re.search("^_|graph", name)):
                answer = answers.get(name, 0 if name.startswith(("memory_", "max_memory_")) else None)
                of_scripts.append((module, name, answer if inspect.isclass(real) else partial(_give, answer)))
    with answering(always, lambda: True), answering(of_scripts, lambda: is_users(sys._getframe(2).f_code.co_filename)):
        yield


def _normalize(_: Any, self: Any, x: Any) -> Any:
    """Be ``SyncBatchNorm.forward`` on the CPU, where torch has none."""
    if not (self.training and dist.is_initialized()):
        return nn.BatchNorm1d.forward(self, x)
    shape, dims = [1, -1, *[1] * (x.dim() - 2)], [0, *range(2, x.dim())]
    total = partial(functional.all_reduce, group=self.process_group)
    count = total(torch.full((1,), float(x.numel() // x.size(1)), dtype=x.dtype))
    mean = total(x.sum(dims)) / count
    variance = total((x - mean.view(shape)).square().sum(dims)) / count
    if self.running_mean is not None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, factor)
            self.running_var.lerp_(variance * count / (count - 1), factor)
    y = (x - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
    return y if self.weight is None else y * self.weight.view(shape) + self.bias.view(shape)


def _refuse_spawn(*_: Any, **__: Any) -> NoReturn:
    raise LaunchError(
        "a simulated rank cannot start ranks by torch.multiprocessing.spawn. Call the function that it starts from the "
        "script, as torchrun's ranks do, or simulate that function by distwrap.testing.simulate(fn, nprocs)."
    )
