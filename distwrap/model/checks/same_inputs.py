"""Notice that all ranks compute on the same inputs, as where `shard_loader` was forgotten: N ranks do the work of one.

Each rank publishes fingerprints of the first inputs of a model in training, and compares them with those that the
others have published; nobody waits. Two different batches that were alike on all ranks are an error. Where the first
ones differ between ranks, nothing of this runs any more. One batch over and over, as for a warm-up, shows nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.utils.data import DataLoader

from distwrap._internals.torch_data import IteratorHook
from distwrap._internals.torch_tree import tensors_in
from distwrap.errors import LoaderError
from distwrap.group.tensor_exchange import ranks_of_shares
from distwrap.group.tensors_apart import bytes_of, is_dense
from distwrap.group.world import RunPart, World
from distwrap.model.checks.in_sync import Ledger, fingerprint, is_power_of_two
from distwrap.model.forward_routing import Routing
from distwrap.seeding import mix
from distwrap.supervision.users_source import loops_around, place_of, users_frames

_FIRST = 3  # forwards that are looked at, each; later ones after powers of two, until the ranks are seen to differ
_ENOUGH = 64  # bytes that the batches say together: a few small whole numbers may be alike by chance
_SAMPLE = 2**12  # bytes of a batch of which it is measured how much they say


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
        if self._world.channel is not None and len(ranks_of_shares()) > 1:
            self._watches.add(InputsWatch(self, self._world, routing))

    def wait(self) -> None:
        """Compare what was not compared yet."""
        for watch in list(self._watches):
            watch.compare()

    def close(self) -> None:
        """Look no more."""
        for watch in list(self._watches):
            watch.stop()


class InputsWatch:
    """Watch over the inputs of one model on this rank, beside those of ranks that have other shares of the data.

    Args:
        run: the watches of the run.
        world: of the run.
        routing: of the model, through which its calls go.
    """

    def __init__(self, run: SameInputs, world: World, routing: Routing) -> None:
        self._run, self._rank, self._routing = run, world.placement.rank, ref(routing)
        self._ledger = Ledger(world, f"inputs/{world.count('watch over inputs')}", ranks_of_shares())
        self._forwards, self._says = 0, dict[str, int]()  # how much each batch says
        self._place = ""
        routing.look_with(self.look)

    def stop(self) -> None:
        """Look no more."""
        routing = self._routing()
        if routing is not None:  # else nobody holds the model any more
            routing.look_with(None)

    def look(self, arguments: Any) -> None:
        """Look at the inputs of a call.

        Raises:
            LoaderError: two batches were the same on all ranks.
        """
        routing = self._routing()
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
        self._says.setdefault(digest, sum(map(_says, tensors)))
        self._ledger.publish(self._forwards, digest)
        self._place = place_of(next(users_frames(), None))
        self.compare()

    def compare(self) -> None:
        """Compare the inputs with those that the other ranks have published.

        Raises:
            LoaderError: two batches were the same on all ranks.
        """
        routing, alike = self._routing(), dict(self._ledger.own)
        if not alike or routing is None or not routing.is_looked_at:
            return
        for rank in self._ledger.others:  # of which the first one has other inputs, where all is well
            theirs = self._ledger.of(rank)
            alike = {forward: digest for forward, digest in alike.items() if forward in theirs}
            if any(theirs[forward] != digest for forward, digest in alike.items()):
                self.stop()
                return
        digests = set(alike.values())
        if len(digests) > 1 and sum(self._says[digest] for digest in digests) >= _ENOUGH:
            self.stop()
            if not any(is_under_way() for is_under_way in self._run.loops.values()):
                raise LoaderError(self._in_words(type(routing.model).__name__))

    def _in_words(self, kind: str) -> str:
        size = len(self._ledger.others) + 1
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
            if any(isinstance(value, DataLoader) and not isinstance(value, IteratorHook) for value in values):
                return place
    return ""
