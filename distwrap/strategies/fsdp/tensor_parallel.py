"""Tensor parallelism: the parameters of layers are divided over the ranks of a group, as a plan says.

What is not in the plan is whole on each rank of the group. All parameters are ``DTensor``s of its mesh, with which
`tensor_math` computes in a forward.

Source: https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distwrap._internals.torch_autograd import in_backward
from distwrap._internals.torch_sharding import own_parameters, shard_in_pieces, silence_redistribution
from distwrap.errors import ModelError
from distwrap.group.tensor_exchange import gather_numbers
from distwrap.model.checks.in_sync import is_power_of_two
from distwrap.strategies import shards
from distwrap.strategies.fsdp.plans import Plan, pattern_of, pieces_of, words_of
from distwrap.strategies.fsdp.tensor_math import TensorMath, spread

silence_redistribution()


class TensorParallel:
    """Model whose layers are divided over the ranks of a group; its ``repr`` is a table of the division.

    Args:
        net: the user's whole model, whose parameters are replaced.
        mesh: the mesh of the group.
        plan: the plan of the strategy.

    Attributes:
        math: the functions of tensors in a forward.
        names: the names of the divided layers.
    """

    def __init__(self, net: nn.Module, mesh: DeviceMesh, plan: Plan | None) -> None:
        self.math, self._net, self._mesh = TensorMath(mesh, self._where), net, mesh
        self._words = words_of(net, plan, mesh.size())
        self.names, self._forwards = list(self._words), 0
        self._entered: list[Any] = []
        self._place()
        self._gathered = {net.get_submodule(name) for name, word in self._words.items() if word == "gathered"}
        self._handles: list[Any] = []
        for module in (each for each in net.modules() if not isinstance(each, torch.jit.ScriptModule)):
            self._handles.append(module.register_forward_pre_hook(self._begin))
            self._handles.append(module.register_forward_hook(self._end, always_call=True))

    def __deepcopy__(self, memo: object) -> TensorParallel:
        """Return itself: a copy of a module has the same hooks."""
        return self

    @contextmanager
    def running(self) -> Iterator[None]:
        """Compute a forward, or a method, of the whole model."""
        compares = self._net.training and not in_backward()
        before = self._states() if compares else None
        with self.math.computing():
            yield
        if before is not None and not torch.equal(before, self._states()):
            self._forwards += 1
            if is_power_of_two(self._forwards):
                self._compare_draws(before)

    def watch(self, name: str, look: Callable[[Any], object]) -> None:
        """Call a function with the arguments of a module's forward when it begins."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not in_backward():
                look((args, kwargs))

        module = self._net.get_submodule(name)
        self._handles.append(module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True))

    def undo(self) -> None:
        """Remove the hooks; the caller restores the parameters."""
        for handle in self._handles:
            handle.remove()

    def __repr__(self) -> str:
        rows: dict[tuple[str, ...], None] = {("modules", "class", "divided", "whole", "on a rank"): None}
        for name, module in self._net.named_modules():
            own = [value for value in own_parameters(module).values() if value is not None]
            if own:
                word = self._words.get(name, "whole")
                shapes = _shapes(own), _shapes([shards.local(value) for value in own])
                rows[pattern_of(name) or "the model", type(module).__name__, word, shapes[0], shapes[1]] = None
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(lines)

    def _place(self) -> None:
        known: dict[int, tuple[nn.Parameter, nn.Parameter, str]] = {}
        modules = [name for name, _ in self._net.named_modules()]
        for name in (*self._words, *modules):  # divided ones first
            module, word = self._net.get_submodule(name), self._words.get(name, "whole")
            for key, parameter in list(own_parameters(module).items()):
                if parameter is None or isinstance(parameter, DTensor):
                    continue
                placement = _placement(word, key)
                if id(parameter) not in known:
                    new = nn.Parameter(spread(parameter, self._mesh, placement), parameter.requires_grad)
                    known[id(parameter)] = parameter, new, name
                _, new, first = known[id(parameter)]
                if word != "whole" and new.placements != (placement,):  # type: ignore[attr-defined]
                    raise ModelError(
                        f"plan= says {self._words[first]!r} of {first!r} and {word!r} of {name!r}, which share the "
                        f"weight {key!r}, and divide it in two ways. Say it of one of them."
                    )
                setattr(module, key, new)

    def _begin(self, module: nn.Module, args: Any) -> None:
        entered = self.math.computing()
        self._entered.append((module, entered, entered.__enter__()))

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._entered or self._entered[-1][0] is not module:  # an earlier hook has raised
            return output
        _, entered, is_outermost = self._entered.pop()
        entered.__exit__(None, None, None)
        is_whole = module in self._gathered or ((is_outermost or module is self._net) and not in_backward())
        return self.math.whole(output) if is_whole else output

    def _where(self) -> str:
        """Return the pattern of the names of the module that computes."""
        names = {module: name for name, module in self._net.named_modules()}
        return pattern_of(names.get(self._entered[-1][0], "") if self._entered else "") or "the model"

    def _states(self) -> torch.Tensor:
        kind, states = self._mesh.device_type, [torch.get_rng_state()]
        if kind != "cpu":
            states.append(torch.get_device_module(kind).get_rng_state().cpu())
        return torch.cat(states)

    def _compare_draws(self, before: torch.Tensor) -> None:
        """Compare the generators with which the ranks of the group have drawn.

        Raises:
            ModelError: the ranks draw different numbers.
        """
        digest = int.from_bytes(hashlib.blake2b(bytes(before.tolist()), digest_size=6).digest(), "little")
        everyones = gather_numbers([digest], self._mesh.get_group())
        if everyones != everyones[:1] * len(everyones):
            ranks = ", ".join(map(str, self._mesh.mesh.flatten().tolist()))
            raise ModelError(
                f"ranks {ranks} are one group, which computes one batch together, but they draw different "
                "random numbers, so that dropout would differ between them. Seed all of them by "
                "seed_everything(). If one rank draws numbers on its own, as for a picture, do that within "
                "torch.random.fork_rng()."
            )


def _placement(word: str, key: str) -> Placement:
    """Return how a parameter of a module is divided, by the module's word and the parameter's name."""
    if key in ("weight", "in_proj_weight"):
        if word == "rowwise":
            return Shard(1)
        if word != "whole":
            return Shard(0) if pieces_of(word) == 1 else shard_in_pieces(0, pieces_of(word))
    return Shard(0) if key == "bias" and word in ("colwise", "gathered") else Replicate()


def _shapes(own: list[torch.Tensor]) -> str:
    return ", ".join(" x ".join(map(str, value.shape)) or "1" for value in own)
