"""Check that ranks which compute together get the same batch, and that ranks of a pipeline draw the same numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distwrap._internals.torch_tree import tensors_in, tree_leaves
from distwrap.errors import ModelError
from distwrap.model.fingerprints import fingerprint
from distwrap.model.in_sync import Held, fingerprints, first_difference
from distwrap.model.watch import is_power_of_two
from distwrap.seeding import mix

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_HINT = "Take the batches from distwrap.shard_loader(loader), which gives all these ranks the same share."


class Alike:
    """Comparison of the inputs of ranks that compute together: at pass 1, 2, 4, 8, ….

    Args:
        group: the ranks.
        device: the device on which they compute.
        what: a description of the ranks, for messages.
        draws_alike: whether they draw the same random numbers.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, what: str, *, draws_alike: bool) -> None:
        self._group, self._ranks, self._device = group, dist.get_process_group_ranks(group), device
        self._what, self._draws_alike, self._passes = what, draws_alike, 0

    def check(self, name: str, given: Any) -> None:
        """Compare the arguments of a method.

        Raises:
            ModelError: the ranks have different arguments.
        """
        self._passes += 1
        if self._passes == 1:
            self._check_first(given)
            if self._draws_alike:
                self._align()
        if not is_power_of_two(self._passes):
            return
        plain = [repr(leaf) for leaf in tree_leaves(given) if isinstance(leaf, _PLAIN)]
        mine = mix(name, *plain, *map(fingerprint, tensors_in(given)))
        own = torch.tensor([mine], device=self._device)
        everyone = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(everyone, own, group=self._group)
        found = [int(each) for each in everyone]
        for rank, number in zip(self._ranks, found, strict=True):
            if number != found[0]:
                raise ModelError(
                    f"{self._what} compute one batch together, but in pass {self._passes} {name}() was given "
                    f"other arguments on rank {rank} than on rank {self._ranks[0]}. {_HINT}"
                )

    def _check_first(self, given: Any) -> None:
        held = [Held(f"tensor {number}", "", tensor) for number, tensor in enumerate(tensors_in(given))]
        everyone: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(everyone, fingerprints(held), self._group)
        difference = first_difference(everyone, ranks=self._ranks)
        if difference is not None:
            self._passes = 0
            raise ModelError(
                f"{self._what} compute one batch together, but were given different ones: {difference}. {_HINT}"
            )

    def _align(self) -> None:
        """Give all ranks the generator of the first rank, as a loop may have seeded it by rank."""
        state = torch.get_rng_state().to(self._device)
        dist.broadcast(state, self._ranks[0], self._group)
        torch.set_rng_state(state.cpu())
