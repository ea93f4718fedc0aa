"""The caller's kind of accelerator, which its ranks must know as well: a package of its maker may have brought it."""

from __future__ import annotations

import importlib
import socket
from contextlib import suppress
from dataclasses import dataclass

import torch

from distwrap.devices.kinds import VENDORS, accelerator_of_torch
from distwrap.devices.selection import visible_devices
from distwrap.errors import LaunchError


@dataclass(frozen=True)
class Accelerator:
    """Accelerators that a process sees.

    Attributes:
        type: torch's name of their type.
        packages: the packages that may have brought the type to torch.
        host: the host on which they are.
    """

    type: str
    packages: tuple[str, ...]
    host: str

    @classmethod
    def capture(cls) -> Accelerator | None:
        """Return the accelerators of this process; ``None`` if it sees none."""
        seen = visible_devices()
        if not seen.count:
            return None
        own = torch.get_device_module(seen.kind).__name__.partition(".")[0]
        packages = (VENDORS[seen.kind].package if seen.kind in VENDORS else "", own)
        return cls(seen.kind, tuple(name for name in packages if name not in ("", "torch")), socket.gethostname())

    def learn(self) -> None:
        """Import the package that brings them, so that torch knows them in this process too.

        Raises:
            LaunchError: torch does not know them here, on the same host.
        """
        for package in self.packages if accelerator_of_torch() != self.type else ():
            with suppress(ImportError):
                importlib.import_module(package)
        if accelerator_of_torch() != self.type and socket.gethostname() == self.host:
            raise LaunchError(
                f"the caller computes on {self.type!r} devices, which torch does not know in this rank: the package "
                f"that brings them must be imported here too. Import it at the top of the script, and leave "
                f"TORCH_DEVICE_BACKEND_AUTOLOAD at 1. Tried: {', '.join(self.packages) or 'nothing'}."
            )
