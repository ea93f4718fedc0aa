"""The module of torch for the pretended devices, ``torch.pretend``: what `torch.cuda` is for NVIDIA's.

torch imports it by itself where ``site/`` is on the path, as it imports the packages of vendors.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator.build import load

_c = load()
NAME = os.environ.get("PRETEND_NAME", "pretend")  # of the type; a maker's, for a stand-in of its package

device_count, current_device, init = _c.device_count, _c.current_device, _c.init
is_initialized, _is_in_bad_fork = _c.is_initialized, _c.is_in_bad_fork
_lazy_call = _c.call_at_first_use
Event = torch.Event


@dataclass(frozen=True)
class Properties:
    name: str
    uuid: str
    total_memory: int
    has_fp64: bool


def _index(device: Any) -> int:
    place = torch.device(NAME, device) if isinstance(device, int) else torch.device(device or NAME)
    if place.type != NAME:
        raise ValueError(f"Expected a {NAME} device, but got: {place}")
    return current_device() if place.index is None else place.index


def is_available() -> bool:
    return device_count() > 0


def empty_cache() -> None:
    """Do nothing: freed memory is kept, since who still reads it on another stream must find NaN there."""


def set_device(device: Any) -> None:
    _c.set_device(_index(device))


def synchronize(device: Any = None) -> None:
    _c.synchronize(_index(device))


def get_device_properties(device: Any = None) -> Properties:
    number = _c.physical(_index(device))
    has_float64 = "PRETEND_WITHOUT_FLOAT64" not in os.environ
    return Properties("pretended", f"PRETEND-{number}", _c.memory_total(), has_float64)


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return _c.memory_total() - _c.memory_allocated(_index(device)), _c.memory_total()


def memory_allocated(device: Any = None) -> int:
    return int(_c.memory_allocated(_index(device)))


class device:
    """Context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        _c.set_device(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _c.set_device(self._before)


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(NAME, _index(device)))


set_stream = torch.accelerator.set_stream


def stream(stream: torch.Stream) -> torch.Stream:
    return stream  # which is a context


def default_generator(device: Any = None) -> torch.Generator:
    generator: torch.Generator = _c.default_generator(_index(device))
    return generator


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    return default_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = NAME) -> None:
    default_generator(device).set_state(new_state)


def manual_seed(seed: int) -> None:
    if is_available():
        default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        default_generator(index).manual_seed(seed)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def _collectives(options: Any, _: Any) -> Any:
    over = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    return _c.make_collectives(over, options.group_rank, options.group_size)


def _scatter(tensor: torch.Tensor, devices: list[int], sizes: Any, dim: int, streams: Any) -> tuple[torch.Tensor, ...]:
    parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(sizes, dim)
    return tuple(part.to(f"{NAME}:{index}") for part, index in zip(parts, devices, strict=False))


def _gather(tensors: list[torch.Tensor], dim: int, device: int) -> torch.Tensor:
    return torch.cat([tensor.to(f"{NAME}:{device}") for tensor in tensors], dim)


def _broadcast_coalesced(tensors: list[torch.Tensor], devices: list[int], size: int) -> list[list[torch.Tensor]]:
    return [[tensor.to(f"{NAME}:{index}") for tensor in tensors] for index in devices]


def _autoload() -> None:
    """Make the devices known to torch, at the end of ``import torch``."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    for function in (
        _scatter,
        _gather,
        _broadcast_coalesced,
    ):  # for DataParallel, which are in torch's CUDA build alone
        setattr(torch._C, function.__name__, function)
    dist.Backend.register_backend("pccl", _collectives, extended_api=True, devices=[NAME])
