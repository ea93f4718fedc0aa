"""CUDA's devices, and those of ROCm, which torch has under the same name: all that is NVIDIA's own stands here."""

import ctypes
import os

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
