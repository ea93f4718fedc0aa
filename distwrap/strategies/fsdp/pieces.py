"""Random numbers for divided blocks: dropout differs between ranks in pieces, and is the same in whole tensors.

The ranks of a group have equal generator states. In a divided block, a tensor is a piece if it was computed from
pieces, or has the length of a piece of the sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from distwrap._internals.torch_autograd import in_backward, saving_hooks
from distwrap.devices.kinds import generators_kept
from distwrap.errors import ModelError
from distwrap.model.watch import is_power_of_two
from distwrap.seeding import mix

_MARK = "_distwrap_is_piece"
_SEEDS = 2**62
_BY_NUMBER = (F.dropout, F.alpha_dropout)
_BY_CHANNEL = (F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout)


class Running:
    """Count of running forwards; only inside of them modules see their parameters as plain tensors of this rank.

    Attributes:
        known: while a model is divided: old and new parameters by the old one's id.
        inside: the running forward of a divided block, which a recomputation enters again.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.inside: Pieces | None = None
        self.known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    def __bool__(self) -> bool:
        return self.depth > 0 or in_backward()  # for recomputed activations


class Pieces(TorchFunctionMode):
    """Forward of a block of which each rank computes a piece.

    Args:
        running: the running forwards of the model.
        mesh: the mesh of the group.
        length: the length of a piece of the sequence; 0 if sequences are whole.
    """

    def __init__(self, running: Running, mesh: DeviceMesh, *, length: int = 0) -> None:
        super().__init__()
        self.running, self.mesh, self.length = running, mesh, length
        self._outside: list[tuple[Any, Any]] = []
        self._place: Any = None

    def __enter__(self) -> Pieces:
        self._outside.append((self.running.inside, self._place))
        self.running.inside, self._place = self, _place()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self.running.inside, self._place = self._outside.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def computed_again(self) -> Iterator[None]:
        """Note that the work in this ``with`` will be recomputed within this forward."""
        before, self._place = self._place, _place()
        try:
            yield
        finally:
            self._place = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_marked = any(_is_marked(each) for each in args)
        if self._draws_apart(func, is_marked, args, kwargs):
            result = self._apart(func, *args, **kwargs)
        else:
            result = func(*args, **kwargs)
        return mark(result) if is_marked else result

    def _draws_apart(self, func: Any, is_marked: bool, args: Any, kwargs: Any) -> bool:
        """Return whether a function draws a random number for each element of a piece."""
        if func is F.scaled_dot_product_attention:
            dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            return dropout > 0 and (is_marked or self.length in args[0].shape)
        if (func not in _BY_NUMBER and func not in _BY_CHANNEL) or not (kwargs["training"] and kwargs["p"] > 0):
            return False
        shape = args[0].shape if func in _BY_NUMBER else args[0].shape[:2]
        return is_marked or self.length in shape

    def _apart(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute with random numbers of this rank alone; the generators stay equal on all ranks."""
        if self._place != _place():
            raise ModelError(
                "a cut layer has dropout within a torch.utils.checkpoint() inside of the block, which would "
                "drop other numbers when it is computed again. Checkpoint whole blocks, or use "
                "FSDPStrategy(checkpointing=True)."
            )
        seed = int(torch.randint(_SEEDS, (), device="cpu"))
        with generators_kept(self.mesh.device_type):
            torch.manual_seed(mix("pieces", seed, self.mesh.get_local_rank()))
            return func(*args, **kwargs)


class CommonNumbers:
    """Comparison of the generators of a group's ranks, at forwards 1, 2, 4, 8, … that draw.

    Args:
        mesh: the mesh of the group.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._forwards = mesh, 0
        self._before: torch.Tensor | None = None

    def begin(self) -> None:
        """Note the states of the generators before a block computes."""
        self._forwards += 1
        self._before = self._states() if is_power_of_two(self._forwards) else None

    def end(self) -> None:
        """Compare these states between the ranks, if the block has drawn numbers.

        Raises:
            ModelError: the ranks draw different numbers.
        """
        before, self._before = self._before, None
        if before is None or torch.equal(before, self._states()):
            return
        kind = self._mesh.device_type
        digest = int.from_bytes(hashlib.blake2b(bytes(before.tolist()), digest_size=7).digest(), "little")
        seen = torch.tensor([digest, -digest], device=kind)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._mesh.get_group())
        if seen[0] != -seen[1]:
            ranks = ", ".join(map(str, self._mesh.mesh.flatten().tolist()))
            raise ModelError(
                f"ranks {ranks} are one group, which computes one batch together, but they draw different "
                "random numbers, so that dropout would differ between them. Seed all of them by "
                "seed_everything(). If one rank draws numbers on its own, as for a picture, do that within "
                "torch.random.fork_rng()."
            )

    def _states(self) -> torch.Tensor:
        kind, states = self._mesh.device_type, [torch.get_rng_state()]
        if kind != "cpu":
            states.append(torch.get_device_module(kind).get_rng_state().cpu())
        return torch.cat(states)


def may_draw(block: nn.Module) -> bool:
    """Return whether a module or a submodule has a probability of dropout, known by its attribute's name."""
    return any(
        isinstance(value, float) and value > 0 and (name == "p" or "drop" in name)
        for part in block.modules()
        for name, value in vars(part).items()
    )


def _place() -> Any:
    """Return a value that differs inside of an activation checkpoint."""
    return torch.is_grad_enabled(), saving_hooks()


def mark(value: Any) -> Any:
    """Mark tensors as pieces that differ between ranks, and return them."""
    if torch.compiler.is_compiling():
        return value
    if isinstance(value, Iterator):
        return iter([mark(each) for each in value])
    for each in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(each, torch.Tensor):
            setattr(each, _MARK, True)
    return value


def unmark(tensor: torch.Tensor) -> torch.Tensor:
    """Remove the mark of a tensor that the ranks have put together, and return it."""
    if not torch.compiler.is_compiling():
        vars(tensor).pop(_MARK, None)
    return tensor


def _is_marked(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return hasattr(value, _MARK)
    return isinstance(value, (tuple, list)) and any(hasattr(each, _MARK) for each in value)
