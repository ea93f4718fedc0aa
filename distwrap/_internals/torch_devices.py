"""Functions of torch that name accelerators, answered for simulated ranks: the script sees as many devices as ranks.

torch's own code sees what is there. Each rank's tensors are on the one device that there is: the first accelerator, or
the CPU. All were seen in versions 2.6 to 2.15; what a version lacks is left out.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.nn import functional
from torch.overrides import TorchFunctionMode

from distwrap.errors import LaunchError

_TYPES = ("cuda", "xpu", "mps", "hpu", "npu")
_MOVES = {"to", "_parse_to"}
_BYTES = 1 << 34  # of a device that is not there
_PROPERTIES = SimpleNamespace(
    name="a simulated device", total_memory=_BYTES, major=8, minor=0, multi_processor_count=1, warp_size=32
)


class OneDevice(TorchFunctionMode):
    """Mode of a rank's thread in which each accelerator that a call names is the one device that there is.

    Relies on ``torch._C._nn:_parse_to``.
    Without it: ``module.to(0)`` of a simulated rank asks for a device that is not there.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if self._device.type == "cpu" and name in ("cuda", "xpu", "pin_memory"):
            return args[0]
        if self._device.type == "cpu" and name == "is_pinned":
            return None
        if name == "cpu":  # a copy, as of a device: later changes of the model are not those of what was kept
            return args[0].clone() if self._device.type == "cpu" else func(*args, **kwargs)
        if name == "cuda":
            return args[0].to(self._device)
        if name in _MOVES:
            first = int(name == "to")  # after the tensor itself
            args = (*args[:first], *(self.of(each, also_numbers=True) for each in args[first:]))
        if kwargs.get("device") is not None:
            kwargs["device"] = self.of(kwargs["device"], also_numbers=True)
        return func(*args, **kwargs)

    def of(self, value: Any, *, also_numbers: bool = False) -> Any:
        """Return a value in which an accelerator's name, or its number, is the device of all ranks."""
        if isinstance(value, torch.device):
            return self._device if value.type in _TYPES else value
        if isinstance(value, str):
            return self._device if value.partition(":")[0] in _TYPES else value
        is_number = also_numbers and isinstance(value, int) and not isinstance(value, bool)
        return self._device if is_number else value


class _NoStream:
    """Stream or event that does nothing: on the CPU all is done where it is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def elapsed_time(self, _: object) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _normalize(self: Any, x: Any) -> Any:
    """Be ``SyncBatchNorm.forward`` on the CPU, where torch has none."""

    def total(value: Any) -> Any:  # with its gradient
        if not self.training or not dist.is_initialized():
            return value
        return functional.all_reduce(value, group=self.process_group or dist.group.WORLD)  # type: ignore[no-untyped-call]

    shape, dims = [1, -1, *[1] * (x.dim() - 2)], [0, *range(2, x.dim())]
    if not self.training and self.running_mean is not None:
        mean, variance = self.running_mean, self.running_var
    else:
        count = total(torch.full((1,), float(x.numel() // x.size(1)), dtype=x.dtype))
        mean = total(x.sum(dims)) / count
        variance = total((x - mean.view(shape)).square().sum(dims)) / count
        if self.training and self.running_mean is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, factor)
                self.running_var.lerp_(variance * count / (count - 1), factor)
    y = (x - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
    return y if self.weight is None else y * self.weight.view(shape) + self.bias.view(shape)


def _nothing(*_: Any, **__: Any) -> None:
    return None


@contextlib.contextmanager
def answered_for_ranks(
    is_users: Callable[[str], bool], ranks: int, rank: Callable[[], int], mode: OneDevice, device: Any
) -> Iterator[None]:
    """Answer the user's code within a ``with`` as if each rank had an accelerator of its own.

    Relies on ``torch.accelerator:current_device_index``, ``torch.nn.parallel:DistributedDataParallel.__init__``,
    ``torch.nn.parallel:DistributedDataParallel._passing_sync_batchnorm_handle``.
    Without it: a script that names what a version lacks fails as it would there.

    Args:
        is_users: returns whether a file is the user's own.
        ranks: their number, which is that of the devices.
        rank: returns the rank of this thread.
        mode: of the ranks' threads.
        device: of all ranks.
    """
    answers: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        "device_count": lambda: ranks,
        **dict.fromkeys(("current_device", "current_device_index", "current_device_idx"), rank),
        **dict.fromkeys(("set_device", "set_device_index", "set_device_idx", "device_index"), _nothing),
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_name": lambda *_, **__: "a simulated device",
        "get_device_capability": lambda *_, **__: (8, 0),
    }
    if device.type == "cpu":
        answers |= dict.fromkeys(("synchronize", "empty_cache", "init", "ipc_collect"), _nothing)
        answers |= dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), _nothing)
        answers |= dict.fromkeys(("set_rng_state", "set_rng_state_all"), _nothing)
        answers |= {"get_rng_state": lambda *_, **__: torch.empty(0), "get_rng_state_all": list}
        answers |= dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), _nothing)
        memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
        answers |= dict.fromkeys(memory, lambda *_, **__: 0)
        answers |= {"mem_get_info": lambda *_, **__: (_BYTES, _BYTES), "memory_summary": lambda *_, **__: ""}
        answers["get_device_properties"] = lambda *_, **__: _PROPERTIES
        answers |= dict.fromkeys(("stream", "current_stream", "default_stream"), _NoStream)
        answers |= dict.fromkeys(("Stream", "Event", "device"), _NoStream)
    changes: list[tuple[Any, str, Any]] = [  # classes that differ, since torch.compile keeps tables of them
        (
            module,
            name,
            type(name, (_NoStream,), {})
            if answer is _NoStream
            else _for_script(getattr(module, name), answer, is_users),
        )
        for module in (torch.cuda, torch.accelerator)
        for name, answer in answers.items()
        if hasattr(module, name)
    ]
    made, load, mesh = nn.parallel.DistributedDataParallel.__init__, torch.load, device_mesh.init_device_mesh

    def make_ddp(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
    ) -> None:
        made(self, module, None, None, *args, **kw)

    def load_here(*args: Any, **kwargs: Any) -> Any:
        if "map_location" in kwargs:
            kwargs["map_location"] = _mapped(kwargs["map_location"], mode)
        return load(args[0], _mapped(args[1], mode), *args[2:], **kwargs) if len(args) > 1 else load(*args, **kwargs)

    def there(device_type: str) -> str:
        return device.type if device_type in _TYPES else device_type

    def make_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return mesh(there(device_type), *args, **kwargs)

    made_mesh, fork = device_mesh.DeviceMesh.__init__, torch.random.fork_rng

    def make_mesh_itself(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        made_mesh(self, there(device_type), *args, **kwargs)

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, mode.of(device))  # type: ignore[call-arg]

    def fork_rng(devices: Any = None, *args: Any, **kwargs: Any) -> Any:
        return fork([] if device.type == "cpu" or devices == [] else [device], *args, **kwargs)

    join = dist.init_process_group

    def join_without_device(*args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Attempted to get default timeout for nccl")
            join(*args, **kwargs)

    changes += [(dist, "init_process_group", join_without_device)]
    changes += [(torch, "Generator", Generator), (device_mesh.DeviceMesh, "__init__", make_mesh_itself)]
    if device.type == "cpu":  # whose parsers of arguments refuse our streams before a mode sees the call
        changes += [(torch.Tensor, "record_stream", _nothing), (nn.SyncBatchNorm, "forward", _normalize)]
        changes += [(nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", _nothing)]
        changes += [(torch.cuda.nvtx, name, _nothing) for name in ("range_push", "range_pop", "mark")]
    changes += [(torch.random, "fork_rng", fork_rng)]  # which pipelines of torch call too
    changes += [(torch.multiprocessing, "spawn", _refuse_spawn)]
    changes += [(nn.parallel.DistributedDataParallel, "__init__", make_ddp), (torch, "load", load_here)]
    changes += [(dist, "init_device_mesh", make_mesh), (device_mesh, "init_device_mesh", make_mesh)]
    default = torch.set_default_device
    changes.append((torch, "set_default_device", lambda device: default(mode.of(device, also_numbers=True))))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, change in changes:
        setattr(owner, name, change)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _refuse_spawn(*_: Any, **__: Any) -> NoReturn:
    raise LaunchError(
        "a simulated rank cannot start ranks by torch.multiprocessing.spawn. Call the function that it starts from the "
        "script, as torchrun's ranks do, or simulate that function by distwrap.testing.simulate(fn, nprocs)."
    )


def _mapped(location: Any, mode: OneDevice) -> Any:
    if isinstance(location, dict):
        return lambda storage, _: storage  # all devices are one
    return mode.of(location, also_numbers=True)


def _for_script(real: Any, answer: Callable[..., Any], is_users: Callable[[str], bool]) -> Callable[..., Any]:
    def asked(*args: Any, **kwargs: Any) -> Any:
        by_script = is_users(sys._getframe(1).f_code.co_filename)
        return answer(*args, **kwargs) if by_script else real(*args, **kwargs)

    return asked
