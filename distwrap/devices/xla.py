"""torch_xla's devices, which torch has no module for."""

from typing import Any

import torch

from distwrap.devices.kinds import DeviceKind


class XLA(DeviceKind):
    """Devices of torch_xla, as TPUs: only noted until a `torch_xla.sync` is what a program computes."""

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

    def unique_name(self, device: torch.device) -> None:
        return None

    def processor(self, device: torch.device) -> str:
        return str(_model().xla_device_hw(device))

    def prevents_fork(self) -> bool:
        return False

    def watch_first_use(self) -> None:
        """Nothing is to do: ranks are never forks."""

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(_model().get_rng_state(device))

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        _model().set_rng_state(int(state), device)

    def streams(self) -> None:
        return None

    def memory(self, device: torch.device) -> None:
        return None

    def peak_memory(self, device: torch.device) -> None:
        return None

    def has_float64(self, device: torch.device) -> bool:
        return True  # computed by the compiler in pairs of float32 where the device lacks it


def _model() -> Any:
    from torch_xla.core import xla_model

    return xla_model
