"""A kind of device of another package."""

from __future__ import annotations

import torch

from distwrap.devices.kinds import DeviceKind


class Meta(DeviceKind):
    """torch's devices without memory, as if they were two accelerators."""

    def __init__(self) -> None:
        super().__init__("meta")

    def count(self) -> int:
        return 2

    def unique_name(self, device: torch.device) -> str | None:
        return f"meta {device.index}"
