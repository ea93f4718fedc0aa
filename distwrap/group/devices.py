"""Which devices there are, and which one is ours. Nothing here initialises an accelerator but `use`."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distwrap.errors import OptionError, PlacementError
from distwrap.placement import Placement


@dataclass(frozen=True)
class Devices:
    """The accelerators this process can see; ``Devices("cpu", 0)`` where there are none."""

    kind: str
    count: int


def visible_devices() -> Devices:
    """Count the accelerators without touching them, so that forking stays possible.

    Apple's MPS counts as none: torch has no process group for it.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        count = torch.cuda.device_count()  # asks NVML, not the driver
        return Devices("cuda", count) if count else Devices("cpu", 0)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type in ("cpu", "mps"):
        return Devices("cpu", 0)
    return Devices(accelerator.type, torch.accelerator.device_count())


def choose_nprocs(asked: int | str, devices: Devices) -> int:
    """Say how many processes to start: as asked, or one an accelerator, or one.

    Raises:
        OptionError: more processes than accelerators.
    """
    if isinstance(asked, str):
        return max(1, devices.count)
    if devices.count and asked > devices.count:
        raise OptionError(
            f"nprocs={asked}, but this machine shows {devices.count} {devices.kind} device(s). "
            f"Ask for at most {devices.count}, or hide the devices to run on the CPU (CUDA_VISIBLE_DEVICES='')."
        )
    return asked


def choose_device(placement: Placement, devices: Devices) -> torch.device:
    """Pick this rank's device: its local rank's, or the only one it was given.

    Raises:
        PlacementError: fewer devices than ranks on this machine, and more than one.
    """
    if devices.count == 0:
        return torch.device("cpu")
    if devices.count >= placement.local_world_size:
        return torch.device(devices.kind, placement.local_rank)
    if devices.count == 1:  # the cluster gave each task a device of its own
        return torch.device(devices.kind, 0)
    raise PlacementError(
        f"{placement.local_world_size} ranks on this machine see {devices.count} {devices.kind} devices: "
        f"start at most {devices.count} ranks here, or give each rank one device."
    )


def use(device: torch.device) -> None:
    """Make the device the current one, so that plain ``.cuda()`` and NCCL land on it."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def choose_backend(asked: str, device: torch.device) -> str:
    """Turn ``"auto"`` into NCCL on CUDA, gloo on the CPU, else what torch names for the device."""
    if asked != "auto":
        return asked
    return str(dist.Backend.default_device_backend_map.get(device.type, "gloo"))


def choose_threads(local_world_size: int) -> int | None:
    """Share the CPUs this process may use among the ranks here; ``None`` where the user has set the number."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, allowed // local_world_size)
