"""Notice that all ranks compute on the same inputs, as where `shard_loader` was forgotten: N ranks do the work of one.

Each rank tells the fingerprints of the first inputs of a model in training, and compares them a forward later with what
the others have told; nobody waits. Two different batches that were alike on all ranks are an error. Where the first
ones differ between ranks, nothing of this runs any more. One batch over and over, as for a warm-up, shows nothing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.utils.data import DataLoader

from distwrap._internals.torch_tree import tensors_in
from distwrap.errors import LoaderError
from distwrap.group.tensor_exchange import ranks_of_shares
from distwrap.group.tensors_apart import bytes_of, is_dense
from distwrap.group.world import RunPart, World
from distwrap.model.fingerprints import fingerprint
from distwrap.model.forward_routing import Routing
from distwrap.model.watch import is_power_of_two
from distwrap.seeding import mix
from distwrap.supervision.users_source import loops_around, place_of, users_frames

_FIRST = 3  # forwards that are looked at, each; later ones after powers of two, until the ranks are seen to differ
_ENOUGH = 64  # bytes that the batches say together: a few small whole numbers may be alike by chance
_SHARDED = "distwrap.data.sharded"  # the module of loaders that are sharded
_SAMPLE = 2**12  # bytes of a batch of which it is told how much they say


class SameInputs(RunPart):
    """The watches over the inputs of a run's models.

    Attributes:
        loops: for each loader that is alike on all ranks on purpose, whether a loop over it is under way.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._watches: WeakSet[InputsWatch] = WeakSet()  # which their models hold
        self.loops: WeakKeyDictionary[object, Callable[[], bool]] = WeakKeyDictionary()

    def watch(self, routing: Routing) -> None:
        """Look at the first inputs of a model that was wrapped just now."""
        others = [rank for rank in ranks_of_shares() if rank != self._world.placement.rank]
        if self._world.channel is not None and others:
            number = self._world.count("watch over inputs")
            self._watches.add(InputsWatch(self, self._world, routing, f"inputs/{number}", others))

    def wait(self) -> None:
        """Compare what was not compared yet."""
        for watch in list(self._watches):
            watch.compare()

    def close(self) -> None:
        """Look no more."""
        for watch in list(self._watches):
            watch.stop()


class InputsWatch:
    """Watch over the inputs of one model on this rank.

    Args:
        run: the watches of the run.
        world: of the run.
        routing: of the model, through which its calls go.
        key: of the model on the side channel, alike on all ranks.
        others: the ranks that have other shares of the data.
    """

    def __init__(self, run: SameInputs, world: World, routing: Routing, key: str, others: list[int]) -> None:
        assert world.channel is not None
        self._run, self._rank, self._channel = run, world.placement.rank, world.channel
        self._held_routing, self._key, self._others = ref(routing), key, others
        self._forwards, self._told, self._says = 0, list[str](), dict[str, int]()
        self._place = ""
        routing.look_with(self.look)

    def stop(self) -> None:
        """Look no more."""
        routing = self._held_routing()
        if routing is not None:  # else nobody holds the model any more
            routing.look_with(None)

    def look(self, arguments: Any) -> None:
        """Look at the inputs of a call.

        Raises:
            LoaderError: two batches were the same on all ranks.
        """
        routing = self._held_routing()
        assert routing is not None  # it calls this
        if not torch.is_grad_enabled() or not routing.model.training or torch.compiler.is_compiling():
            return
        self._forwards += 1
        if self._forwards > _FIRST and not is_power_of_two(self._forwards):
            return
        tensors = [tensor.detach() for tensor in tensors_in(arguments) if tensor.numel() and not tensor.is_meta]
        if not tensors:
            self.stop()
            return
        digest = f"{mix(*map(fingerprint, tensors)):x}"
        if digest not in self._says:
            self._says[digest] = sum(map(_says, tensors))
        self._told.append(digest)
        self._channel.note(self._key, json.dumps(self._told))
        self._place = place_of(next(users_frames(), None))
        self.compare()

    def compare(self) -> None:
        """Compare the inputs with those that the other ranks have told.

        Raises:
            LoaderError: two batches were the same on all ranks.
        """
        routing = self._held_routing()
        if not self._told or routing is None or not routing.is_looked_at:
            return
        told_by_all = len(self._told)
        for rank in self._others:  # of which the first one has other inputs, where all is well
            theirs = json.loads(self._channel.noted(self._key, rank) or "[]")
            if any(one != other for one, other in zip(theirs, self._told, strict=False)):
                self.stop()
                return
            told_by_all = min(told_by_all, len(theirs))
        alike = set(self._told[:told_by_all])
        if len(alike) < 2 or sum(self._says[digest] for digest in alike) < _ENOUGH:
            return
        self.stop()
        if not any(is_under_way() for is_under_way in self._run.loops.values()):
            raise LoaderError(self._in_words(type(routing.model).__name__))

    def _in_words(self, kind: str) -> str:
        size = len(self._others) + 1
        seen = (
            f"rank {self._rank}: {kind} has got the same inputs on all {size} ranks, batch after "
            f"batch{self._place and f', at {self._place}'}: {size} ranks do the same work, and the model "
            "learns nothing from the other samples (DW201)."
        )
        if loop := _plain_loop():
            way = f"The loop at {loop} iterates over a DataLoader that is not sharded: give it shard_loader(loader)."
        else:
            way = (
                "Write loader = shard_loader(loader), or, in a loop that cuts its batches itself, split(x[i : i + n]), "
                "which is this rank's part of the batch. Random numbers that the loop draws by itself, as by "
                "torch.randint or torch.randn, must differ between the ranks: "
                "generator=rank_generator(seed), or seed_everything(seed, apart=True) once the model is made."
            )
        return (
            f"{seen} {way} If all ranks are meant to have the same inputs, say shard_loader(loader, "
            "mode='same'), or wrap_model(model, same_inputs=True)."
        )


def _says(tensor: torch.Tensor) -> int:
    """Return about how many bytes a tensor's first numbers say: those of a constant say nothing."""
    plain = tensor if is_dense(tensor) else tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    data = bytes_of(plain.reshape(-1)[: _SAMPLE // plain.element_size()])
    return len(zlib.compress(data)) - len(zlib.compress(bytes(len(data))))


def _plain_loop() -> str:
    """Return where the loop over a plain loader is that is under way in the user's code; empty where there is none.

    For an error alone: in older Pythons a look at a function's variables keeps what they hold alive.
    """
    for frame in users_frames():
        for place, values in loops_around(frame):
            if any(isinstance(value, DataLoader) and type(value).__module__ != _SHARDED for value in values):
                return place
    return ""
