"""Which devices this process sees, and which one a rank takes. Nothing here initialises an accelerator."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distwrap.devices.kinds import kind_of, kind_of_torch
from distwrap.environments import Placement
from distwrap.errors import OptionError, PlacementError
from distwrap.simulated import simulation
from distwrap.wording import named_ranks, unknown_name


@dataclass(frozen=True)
class Devices:
    """Accelerators that this process can see; ``Devices("cpu", 0)`` where there are none."""

    kind: str
    count: int

    @property
    def hidden_by(self) -> str:
        """The variable that hides some of them, in brackets; empty where nobody knows."""
        variable = kind_of(self.kind).visible_by
        return variable and f" (by {variable})"


def visible_devices() -> Devices:
    """Count the accelerators without touching them, so that forking stays possible."""
    kind = kind_of_torch()
    return Devices(kind.type, count) if (count := kind.count()) else Devices("cpu", 0)


def are_shared(asked: bool, devices: Devices, ranks_here: int) -> bool:
    """Return whether ranks share devices: there are some, but fewer than ranks here, and sharing was asked for."""
    return asked and 0 < devices.count < ranks_here


def choose_nprocs(asked: int | str, devices: Devices) -> int:
    """Return how many processes to start: as asked, or one for each accelerator, or one.

    Raises:
        OptionError: more processes were asked for than there are accelerators.
    """
    if isinstance(asked, str):
        return max(1, devices.count)
    if devices.count and asked > devices.count:
        raise OptionError(
            f"nprocs={asked}, but this node shows {devices.count} {devices.kind} device(s). "
            f"Ask for at most {devices.count}, hide the devices to run on the CPU{devices.hidden_by}, or let ranks "
            f"share them, to try them out, with share_devices=True."
        )
    return asked


def choose_device(placement: Placement, devices: Devices, *, shared: bool = False) -> torch.device:
    """Return this rank's device: its local rank's, or the only one it was given.

    Args:
        placement: this rank's place.
        devices: that this process sees.
        shared: whether ranks may share them, which then take turns.

    Raises:
        PlacementError: there is more than one device, but fewer than ranks on this node.
    """
    if (simulated := simulation()) is not None:
        return torch.device(simulated.device)
    if devices.count == 0:
        return torch.device("cpu")
    if devices.count >= placement.local_world_size:
        return torch.device(devices.kind, placement.local_rank)
    if devices.count == 1 or shared:  # one: the cluster gave each task a device of its own
        return torch.device(devices.kind, placement.local_rank % devices.count)
    raise PlacementError(
        f"{placement.local_world_size} ranks on this node see {devices.count} {devices.kind} devices: "
        f"start at most {devices.count} ranks here, or give each rank one device{devices.hidden_by}."
    )


def choose_backend(asked: str, device: torch.device, *, shared: bool = False) -> str:
    """Return the backend that was asked for; for ``"auto"`` the one of the device's kind.

    Args:
        asked: by the options.
        device: this rank's.
        shared: whether other ranks have it too.

    Raises:
        OptionError: gloo is to exchange what is on devices that it does not know, or NCCL what is on no GPU, or on one
            that ranks share.
    """
    usual = kind_of(device).backend()
    if shared and usual == "nccl":
        if "nccl" in asked.lower():
            raise OptionError(
                f"backend={asked!r}: NCCL takes no two ranks on one GPU, and with share_devices=True they share "
                f"{device}: leave backend at 'auto', which then chooses gloo."
            )
        usual = "gloo"
    backend = usual if asked == "auto" else asked
    if usual != "nccl" and any(part.endswith("nccl") for part in backend.lower().split(",")):
        raise OptionError(
            f"backend={asked!r} works on NVIDIA's and AMD's GPUs only, and this rank is on {device}: leave "
            f"backend at 'auto', which chooses {usual!r} here, and 'nccl' where there are GPUs."
        )
    known = (*dist.Backend.backend_capability.get("gloo", ()), "cpu", "meta")
    if backend == "gloo" and device.type not in known:
        way = ": leave backend at 'auto', or hide the devices."
        if asked == "auto":
            way = ", and torch names no other for them: import the package that brings it."
        raise OptionError(f"backend={asked!r}: gloo takes no tensors of {device.type!r} devices{way}")
    return backend


def check_backend(asked: str) -> None:
    """Refuse a backend that torch.distributed does not know, also among several as ``"cpu:gloo,cuda:nccl"``.

    Raises:
        OptionError: lists the known ones and the nearest.
    """
    known = {"auto", *dist.Backend.backend_list} - {dist.Backend.UNDEFINED}
    for each in asked.lower().split(","):
        kind, _, backend = each.rpartition(":")
        if backend not in known:
            raise OptionError(unknown_name("backend", backend, known))
        try:
            torch.device(kind or "cpu")
        except RuntimeError:
            kinds = dist.Backend.default_device_backend_map
            raise OptionError(f"backend={asked!r}: {unknown_name('kind of device', kind, kinds)}") from None


def check_not_shared(rank: int, device: torch.device, registrations: dict[int, dict[str, Any]]) -> None:
    """Raise an error if another rank has the same accelerator, which nearly always is a mistake in the launch.

    Args:
        rank: this process's rank.
        device: this rank's device.
        registrations: those of the ranks on this node.

    Raises:
        PlacementError: names the ranks and the device.
    """
    mine = registrations[rank]
    others = [r for r, their in registrations.items() if r != rank and mine["gpu"] and their["gpu"] == mine["gpu"]]
    if others:
        raise PlacementError(
            f"{named_ranks([rank, *others])} on {mine['host']} are all on the same physical device ({device} "
            f"of rank {rank}, {mine['gpu']}). Give each a device of its own (one visible to each rank, or all "
            f"visible to all), or say setup_process_group(device=…) or share_devices=True where sharing is meant."
        )
