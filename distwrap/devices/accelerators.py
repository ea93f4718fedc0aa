"""Accelerators of which torch's own way is not enough: CUDA, Apple's MPS and torch_xla's devices."""

import ctypes
import os
from typing import Any

import torch

from distwrap.devices.kinds import DeviceKind
from distwrap.versions import TORCH


class CUDA(DeviceKind):
    """GPUs of NVIDIA, and of AMD through ROCm."""

    visible_by = "CUDA_VISIBLE_DEVICES"
    counts_untouched = True

    def __init__(self) -> None:
        super().__init__("cuda")

    def is_built(self) -> bool:
        return torch.version.cuda is not None or torch.version.hip is not None

    def count(self) -> int:
        return torch.cuda.device_count()  # asks NVML, not the driver

    def bound(self, device: torch.device) -> torch.device:
        return device

    def prevents_fork(self) -> bool:
        return bool(torch.cuda.is_initialized()) or _driver_is_initialised()  # type: ignore[no-untyped-call]

    def versions(self) -> dict[str, str]:
        if torch.version.cuda is None:
            return {}
        found = {"cuda": torch.version.cuda}
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return found

    def unused(self) -> str | None:
        if not os.path.exists("/dev/nvidiactl") or self.count():
            return None
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        why = "CUDA_VISIBLE_DEVICES is empty" if hidden else f"torch {TORCH} sees none"
        return f"there is an NVIDIA driver, but no device is used: {why}."


def _driver_is_initialised() -> bool:
    """Ask CUDA's driver itself: a mere ``torch.cuda.is_available()`` starts it, and a fork cannot use it then.

    Source: CUDA driver API, error 3 (CUDA_ERROR_NOT_INITIALIZED) of any call before cuInit.
    """
    if torch.version.cuda is None:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)


class MPS(DeviceKind):
    """The GPU of a Mac, of which there is one, and for which torch has no process group: it is used where it is named.

    Source: https://docs.pytorch.org/docs/stable/mps.html
    """

    def __init__(self) -> None:
        super().__init__("mps")

    def use(self, device: torch.device) -> None:
        """Nothing is to do: there is no other."""

    def finish(self, device: torch.device) -> None:
        torch.mps.synchronize()

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.mps.get_rng_state()

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.mps.set_rng_state(state.cpu())

    def memory(self, device: torch.device) -> int | None:
        return int(torch.mps.recommended_max_memory())


class XLA(DeviceKind):
    """Devices of torch_xla, as TPUs: only noted until a `torch_xla.sync` is what a program computes.

    A TPU without float64 has it computed in pairs of float32, by the compiler.
    """

    def __init__(self) -> None:
        super().__init__("xla")

    def count(self) -> int:
        return 0  # torch_xla starts its ranks itself

    def backend(self) -> str:
        return "xla"

    def use(self, device: torch.device) -> None:
        """Nothing is to do: torch_xla gives each rank its own."""

    def finish(self, device: torch.device) -> None:
        import torch_xla

        torch_xla.sync(wait=True)

    def processor(self, device: torch.device) -> str:
        return str(_xla_model().xla_device_hw(device))

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(_xla_model().get_rng_state(device))

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        _xla_model().set_rng_state(int(state), device)


def _xla_model() -> Any:
    from torch_xla.core import xla_model

    return xla_model
