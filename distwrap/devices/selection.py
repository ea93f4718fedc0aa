"""Which devices there are, and which one is ours. Nothing here initialises an accelerator but `use`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distwrap.environments import Placement
from distwrap.errors import OptionError, PlacementError


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


def finish(device: torch.device) -> None:
    """Wait until a device has done what it was given, so that a clock can be read."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def choose_backend(asked: str, device: torch.device) -> str:
    """Turn ``"auto"`` into NCCL on CUDA, gloo on the CPU, else what torch names for the device."""
    if asked != "auto":
        return asked
    return str(dist.Backend.default_device_backend_map.get(device.type, "gloo"))


def unique_name(device: torch.device) -> str | None:
    """Name a physical accelerator, so that two ranks on the same one can be told; ``None`` for the CPU."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def refuse_shared(rank: int, device: torch.device, came: dict[int, dict[str, Any]]) -> None:
    """Refuse to share an accelerator with another rank, which nearly always is a mistake in the launch.

    Args:
        rank: ours.
        device: ours.
        came: what the ranks of this machine have said of themselves.
    """
    mine = came[rank]
    others = [other for other, said in came.items() if other != rank and mine["gpu"] and said["gpu"] == mine["gpu"]]
    if others:
        shared = ", ".join(map(str, sorted([rank, *others])))
        raise PlacementError(
            f"ranks {shared} on {mine['host']} are all on the same physical device ({device} of rank {rank}, "
            f"{mine['gpu']}). Give each a device of its own (one visible to each rank, or all visible to all), or say "
            f"setup_process_group(device=…) where sharing is meant."
        )
