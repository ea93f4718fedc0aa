"""Apple's GPU, of which there is one, and for which torch has no process group: it is used where it is named."""

import torch

from distwrap.devices.kinds import DeviceKind


class MPS(DeviceKind):
    """The GPU of a Mac.

    Source: https://docs.pytorch.org/docs/stable/mps.html
    """

    def __init__(self) -> None:
        super().__init__("mps")

    def use(self, device: torch.device) -> None:
        """Nothing is to do: there is no other."""

    def finish(self, device: torch.device) -> None:
        torch.mps.synchronize()

    def unique_name(self, device: torch.device) -> None:
        return None

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.mps.get_rng_state()

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.mps.set_rng_state(state.cpu())

    def streams(self) -> None:
        return None

    def memory(self, device: torch.device) -> int | None:
        return int(torch.mps.recommended_max_memory())
