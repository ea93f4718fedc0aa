"""Proof that the ranks of a pipeline run on one batch, and draw the same random numbers."""

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
from distwrap.strategies.pipeline.schedule import Line

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_HINT = "Take the batches from distwrap.shard_loader(loader), which gives all ranks of a pipeline the same share."


class Alike:
    """Comparison of what the ranks of a pipeline are given: at the first pass, and at pass 2, 4, 8, ….

    Args:
        line: this rank's place.
    """

    def __init__(self, line: Line) -> None:
        self._line, self._passes = line, 0

    def check(self, name: str, given: Any) -> None:
        """Compare the arguments of a method.

        Raises:
            ModelError: the ranks have been given others.
        """
        self._passes += 1
        if self._passes == 1:
            self._check_first(given)
            self._align()
        if not is_power_of_two(self._passes):
            return
        plain = [repr(leaf) for leaf in tree_leaves(given) if isinstance(leaf, _PLAIN)]
        mine = mix(name, *plain, *map(fingerprint, tensors_in(given)))
        own = torch.tensor([mine], device=self._line.device)
        everyone = [torch.empty_like(own) for _ in self._line.ranks]
        dist.all_gather(everyone, own, group=self._line.group)
        found = [int(each) for each in everyone]
        for rank, number in zip(self._line.ranks, found, strict=True):
            if number != found[0]:
                raise ModelError(
                    f"the ranks of a pipeline run on one batch, and pass {self._passes}, of {name}(), has been given "
                    f"other arguments on rank {rank} than on rank {self._line.ranks[0]}. {_HINT}"
                )

    def _check_first(self, given: Any) -> None:
        held = [Held(f"tensor {number}", "", tensor) for number, tensor in enumerate(tensors_in(given))]
        everyone: list[Any] = [None] * len(self._line.ranks)
        dist.all_gather_object(everyone, fingerprints(held), self._line.group)
        difference = first_difference(everyone, ranks=self._line.ranks)
        if difference is not None:
            self._passes = 0
            raise ModelError(
                f"the ranks of a pipeline run on one batch, and these have been given others: {difference}. {_HINT}"
            )

    def _align(self) -> None:
        """Let the generator of the first rank be that of all, which a loop may have seeded by rank."""
        state = torch.get_rng_state().to(self._line.device)
        dist.broadcast(state, self._line.ranks[0], self._line.group)
        torch.set_rng_state(state.cpu())
