"""Random numbers of torch: those of the CPU, and those of a device."""

from contextlib import AbstractContextManager

import torch


def generators_kept(device: torch.device | str) -> AbstractContextManager[None]:
    """Return a context after which the CPU's generator, and a device's, go on where they were.

    Example:
        >>> state = torch.get_rng_state()
        >>> with generators_kept("cpu"):
        ...     _ = torch.rand(2)
        >>> torch.equal(torch.get_rng_state(), state)
        True
    """
    place = torch.device(device)
    if place.type == "cpu":
        return torch.random.fork_rng(devices=[])
    index = torch.get_device_module(place.type).current_device() if place.index is None else place.index
    return torch.random.fork_rng(devices=[index], device_type=place.type)
