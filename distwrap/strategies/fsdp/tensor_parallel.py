"""Tensor and sequence parallelism: blocks of a model are divided over the ranks of a group, and proven.

Layers that cannot be divided are whole on each rank of the group. All parameters are ``DTensor``s of its mesh.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from distwrap._internals.torch_autograd import in_backward
from distwrap._internals.torch_sharding import own_parameters, silence_redistribution
from distwrap.devices.kinds import widest
from distwrap.errors import ModelError
from distwrap.group.world import current_world
from distwrap.strategies import shards
from distwrap.strategies.fsdp.pieces import CommonNumbers, Pieces, Running, mark, may_draw
from distwrap.strategies.fsdp.plan_words import Plan
from distwrap.strategies.fsdp.plans import (
    Cuts,
    asked_for,
    blocks_of,
    guesses,
    holds_blocks,
    large,
    shared_weights,
    unit_of,
)
from distwrap.strategies.fsdp.proof import Proof, Twins, add_summed, trial_inputs, trial_numbers
from distwrap.strategies.fsdp.styles import cut_along, put_together, style_of, summed_of

silence_redistribution()

Thing = TypeVar("Thing")

_ALONE = ("gathered", "vocabulary")


class TensorParallel:
    """Model whose blocks are divided over the ranks of a group; its ``repr`` is a table of the division.

    Args:
        net: the user's whole model, which is changed in place.
        mesh: the mesh of the group.
        plan: the plan of the strategy.
        by_sequence: whether the other layers compute with pieces of the sequence.
        shares: the number of ranks over which FSDP divides the parts.

    Attributes:
        running: the running forwards of the model.
        rows: the rows of the table: modules, class, division, shapes, and shapes on a rank.
        names: the names of the divided blocks.
    """

    def __init__(self, net: nn.Module, mesh: DeviceMesh, plan: Plan, *, by_sequence: bool, shares: int) -> None:
        self.running, self._net, self._mesh, self._by_sequence = Running(), net, mesh, by_sequence
        self._shares, self._reasons = shares, dict[str, str]()
        self._undo: list[Callable[[], object]] = []
        self._inside: list[Pieces | None] = []
        self._common, self._piece = CommonNumbers(mesh), 0
        types = {parameter.dtype for parameter in net.parameters() if parameter.is_floating_point()}
        self._dtype = torch.float64 if torch.float64 in types else torch.float32
        self._summed: dict[str, list[tuple[str, str]]] = {}
        units = self._found() if plan == "auto" else self._named(plan)
        self._cut_all(units)
        self.rows, self.names = self._table(units), list(units)

    @property
    def compiles(self) -> bool:
        """Whether torch.compile may compile it, which would draw one dropout mask for the pieces of all ranks."""
        return not any(may_draw(self._net.get_submodule(name)) for name in self.names)

    def watch(self, name: str, look: Callable[[Any], object]) -> None:
        """Call a function with the arguments of a module's forward when it begins."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling() and not in_backward():
                look((args, kwargs))

        module = self._net.get_submodule(name)
        self._undo.append(module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True).remove)

    def inside(self) -> Pieces | None:
        """Return the context of a block's running forward, or ``None``."""
        return self.running.inside

    def undo(self) -> None:
        """Undo all changes that cannot be seen on the modules: proofs, numbers of heads, pieces of sequences."""
        for undo in reversed(self._undo):
            undo()

    def __repr__(self) -> str:
        head = ("modules", "class", "cut", "whole", "on a rank")
        widths = [max(len(row[i]) for row in (head, *self.rows)) for i in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *self.rows)
        ]
        reasons = [f"{name} is whole: {why}" for name, why in self._reasons.items()]
        return "\n".join(line.rstrip() for line in (*lines, *dict.fromkeys(reasons)))

    # What is cut

    def _named(self, plan: Any) -> dict[str, Cuts]:
        units, blocks = dict[str, Cuts](), blocks_of(self._net)
        cuts = asked_for(self._net, plan, self._mesh.size())
        for name, word in cuts.words.items():
            unit = name if word in _ALONE else unit_of(self._net, name.rpartition(".")[0], blocks)
            units[unit] = units.get(unit, Cuts()) | Cuts({_inside(unit, name): word})
        for (name, attribute), value in cuts.numbers.items():
            unit = unit_of(self._net, name, blocks)
            units[unit] = units.get(unit, Cuts()) | Cuts({}, {(_inside(unit, name), attribute): value})
        units = _outermost(units, lambda cuts, other: cuts | other, _below)
        shared = shared_weights(self._net)
        for name in cuts.words:
            if not shared.isdisjoint(map(id, self._net.get_submodule(name).parameters())):
                raise ModelError(f"plan= cuts {name!r}, which shares its weight with another module. Say 'whole'.")
        return {unit: self._in_pieces(cuts) for unit, cuts in units.items() if cuts.words}

    def _found(self) -> dict[str, Cuts]:
        net, ranks, shared = self._net, self._mesh.size(), shared_weights(self._net)
        blocks = blocks_of(net)
        groups: dict[str, list[list[Cuts]]] = {}
        for name, module in net.named_modules():
            if holds_blocks(module, blocks):
                continue  # more than a function is between its own layers
            for ways, why in guesses(module, ranks):
                fit = [way for way in ways if self._fits(module, way, shared)]
                if not fit:
                    self._reasons[_general(name)] = why or "its weights are shared, or its inputs cannot be divided"
                    continue
                unit = unit_of(net, name, blocks)
                groups.setdefault(unit, []).append([_below(_inside(unit, name), way) for way in fit])
        groups = _outermost(
            groups,
            lambda ways, other: ways + other,
            lambda at, ways: [[_below(at, way) for way in each] for each in ways],
        )
        units, kinds = {}, dict[str, tuple[Cuts, list[tuple[str, str]]]]()
        for unit, ways_of_groups in groups.items():
            kind = _kind_of(net.get_submodule(unit))
            if kind not in kinds:
                kinds[kind] = self._tried(unit, ways_of_groups)
            if kinds[kind][0].words:
                units[unit], self._summed[unit] = kinds[kind]
        for name, module in net.named_modules():
            word = large(module, ranks)
            is_cut = any(_is_inside(name, unit) for unit in units)
            if word and not is_cut and shared.isdisjoint(map(id, module.parameters())):
                units[name] = Cuts({"": word})
        return units

    def _fits(self, module: nn.Module, way: Cuts, shared: set[int]) -> bool:
        for name, word in way.words.items():
            layer = module.get_submodule(name)
            width = layer.embed_dim if isinstance(layer, nn.MultiheadAttention) else getattr(layer, "in_features", 0)
            if not shared.isdisjoint(map(id, layer.parameters())) or hasattr(layer, "parametrizations"):
                return False
            if (word.startswith("packed") or word == "heads") and width % self._shares:
                return False
        return True

    def _tried(self, unit: str, groups: list[list[Cuts]]) -> tuple[Cuts, list[tuple[str, str]]]:
        """Return the parts of a block that can be divided, as far as a trial without data shows."""
        block, device = self._net.get_submodule(unit), self._mesh.device_type
        kind = widest(current_world().device)
        first = next(part for part in block.modules() if hasattr(part, "in_features") or hasattr(part, "embed_dim"))
        width = int(getattr(first, "in_features", 0) or getattr(first, "embed_dim", 0))
        inputs = trial_inputs(block, width, self._mesh.size(), kind, device)
        numbers = trial_numbers(block, kind, device)
        taken, summed, can_try = Cuts(), list[tuple[str, str]](), bool(inputs) and numbers is not None
        can_try = can_try and self._twins(block, Cuts(), kind).can_be_tried(numbers or {}, inputs)
        for ways in groups:
            for way in ways:
                if not can_try:
                    taken = taken | way
                    break
                found = self._twins(block, taken | way, kind).difference(numbers or {}, inputs, {})
                why, sums = found or ("", [])
                if found is None or why.startswith("its forward cannot"):
                    can_try, taken = False, taken | ways[0]
                    break
                if not why:
                    taken, summed = taken | way, sums
                    break
                self._reasons[_general(f"{unit}.{next(iter(way.words))}")] = why
        pieces = self._in_pieces(taken)
        if can_try and pieces.by_sequence and taken.words:
            why, sums = _statistics_of(block), summed
            if not why:
                why, sums = self._twins(block, pieces, kind).difference(numbers or {}, inputs, {}) or ("", summed)
            if why:
                self._reasons[_general(unit)] = f"{why}, by pieces of the sequence"
                return taken, summed
            summed = sums
        return pieces, summed

    def _in_pieces(self, cuts: Cuts) -> Cuts:
        return replace(cuts, by_sequence=self._by_sequence and not set(_ALONE).intersection(cuts.words.values()))

    def _twins(self, block: nn.Module, cuts: Cuts, dtype: torch.dtype) -> Twins:
        return Twins(block, lambda twin: self._cut(twin, cuts, []), self._mesh, self.running, dtype)

    # Cutting

    def _cut_all(self, units: dict[str, Cuts]) -> None:
        net = self._net
        kinds: dict[str, list[str]] = {}
        for unit in units:
            kinds.setdefault(f"{_kind_of(net.get_submodule(unit))} {units[unit]}", []).append(unit)
        twins = {
            names[0]: self._twins(net.get_submodule(names[0]), units[names[0]], self._dtype) for names in kinds.values()
        }
        for unit, cuts in units.items():
            self._cut(net.get_submodule(unit), cuts, self._undo)
            add_summed(net.get_submodule(unit), self._summed.get(unit, []))
        self._cut(net, Cuts(), self._undo)
        self.running.known.clear()
        for names in kinds.values():
            blocks = [net.get_submodule(name) for name in names]
            layers, says = [*units[names[0]].words], self._says(names[0])
            proof = Proof(names[0] or "the model", twins[names[0]], blocks, layers, says)
            self._undo.append(proof.end)

    def _says(self, name: str) -> str:
        """Return advice for a block that is not right when it is divided."""
        says = f"Say plan={{…}} with other styles, or 'whole' of the layers in {_general(name)!r}"
        return f"{says}, or leave sequence_parallel out." if self._by_sequence else f"{says}."

    def _cut(self, module: nn.Module, cuts: Cuts, undo: list[Callable[[], object]]) -> None:
        """Divide a block, or its twin, in place."""
        for (name, attribute), value in cuts.numbers.items():
            holder = module.get_submodule(name)
            undo.append(_setting(holder, attribute, getattr(holder, attribute)))
            setattr(holder, attribute, value)
        gathers = set[str]()  # parts that need a whole sequence in a block with a piece
        for name, word in cuts.words.items():
            part, owner = module.get_submodule(name), name.rpartition(".")[0]
            if owner and word not in ("rowwise", "heads"):
                gathers.add(owner)
            style = style_of(
                word, self.running, by_sequence=cuts.by_sequence and (word == "rowwise" or owner not in gathers)
            )
            parallelize_module(part, self._mesh, style, src_data_rank=None)
            if word == "colwise" or word.startswith("packed"):
                undo.append(part.register_forward_hook(lambda part, args, output: mark(output)).remove)
            if word == "heads":  # without a hook torch may bypass the forward
                undo.append(part.register_forward_pre_hook(lambda *_: None).remove)
        for at, part in module.named_modules():
            own = [value for value in own_parameters(part).values() if value is not None]
            if own and not all(isinstance(value, DTensor) for value in own):
                in_pieces = cuts.by_sequence and not any(_is_inside(at, owner) for owner in gathers)
                parallelize_module(part, self._mesh, style_of("whole", self.running, by_sequence=in_pieces))
            if isinstance(part, nn.TransformerEncoder) and part.use_nested_tensor:
                undo.append(_setting(part, "use_nested_tensor", True))
                part.use_nested_tensor = False
        if cuts.by_sequence:
            if why := _statistics_of(module):
                raise ModelError(f"sequence_parallel=True: {type(module).__name__} {why}. Leave it out.")
            undo.append(module.register_forward_pre_hook(self._divide_sequence, with_kwargs=True).remove)
        if cuts.words and not set(_ALONE).issuperset(cuts.words.values()):
            undo.append(module.register_forward_pre_hook(partial(self._begin, by_sequence=cuts.by_sequence)).remove)
            undo.append(module.register_forward_hook(self._end, always_call=True).remove)
        if cuts.by_sequence:
            undo.append(module.register_forward_hook(self._join_sequence).remove)
            for owner in gathers:
                undo.append(module.get_submodule(owner).register_forward_pre_hook(self._gather_sequence).remove)

    def _begin(self, block: nn.Module, args: Any, *, by_sequence: bool) -> None:
        length = self._piece if by_sequence else 0
        draws = block.training and not torch.compiler.is_compiling()
        pieces = Pieces(self.running, self._mesh, length=length) if draws else None
        if pieces is not None:
            self._common.begin()
            pieces.__enter__()
        self._inside.append(pieces)

    def _end(self, block: nn.Module, args: Any, output: Any) -> None:
        if self._inside and (pieces := self._inside.pop()) is not None:
            pieces.__exit__(None, None, None)
            if output is not None:  # without an exception
                self._common.end()

    def _divide_sequence(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        x = next(iter((*args, *kwargs.values())), None)
        if not isinstance(x, torch.Tensor) or x.dim() < 3 or x.shape[1] % self._mesh.size():
            what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise ModelError(
                f"sequence_parallel=True: {type(block).__name__} got {what} first, whose second dimension cannot "
                f"be divided over {self._mesh.size()} ranks. Pad the sequences, or leave sequence_parallel out."
            )
        self._piece = x.shape[1] // self._mesh.size()
        piece = cut_along(x, self._mesh, 1)
        return ((piece, *args[1:]), kwargs) if args else ((), {**kwargs, next(iter(kwargs)): piece})

    def _gather_sequence(self, part: nn.Module, args: Any) -> Any:
        if args[0].dim() < 3 or args[0].shape[1] != self._piece:  # as words chosen by a router
            raise ModelError(
                f"sequence_parallel=True: {type(part).__name__} got a tensor of shape {tuple(args[0].shape)}, "
                f"not a sequence of which each rank has {self._piece} words. Leave sequence_parallel out."
            )
        return put_together(args[0], self._mesh, 1), *args[1:]

    def _join_sequence(self, block: nn.Module, args: Any, output: Any) -> Any:
        whole = self._gather_sequence(block, output if isinstance(output, tuple) else (output,))
        return whole if isinstance(output, tuple) else whole[0]

    # The table

    def _table(self, units: dict[str, Cuts]) -> list[tuple[str, str, str, str, str]]:
        words = {_joined(unit, name): word for unit, cuts in units.items() for name, word in cuts.words.items()}
        rows: dict[tuple[str, str, str, str, str], None] = {}
        for name, module in self._net.named_modules():
            own = {key: value for key, value in own_parameters(module).items() if value is not None}
            if own:
                word = words.get(name) or ("rowwise" if words.get(name.rpartition(".")[0]) == "heads" else "whole")
                if word == "whole" and summed_of(module):
                    word = "whole, gradients summed"
                shapes = [_shapes(own, lambda value: value), _shapes(own, shards.local)]
                rows[_general(name), type(module).__name__, word, shapes[0], shapes[1]] = None
        return list(rows)


def _shapes(own: dict[str, Any], seen: Callable[[Any], torch.Tensor]) -> str:
    return ", ".join(" x ".join(map(str, seen(value).shape)) or "1" for value in own.values())


def _setting(owner: nn.Module, attribute: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, attribute, value)


def _kind_of(block: nn.Module) -> str:
    """Return a text that is equal for blocks with the same computation, whatever their numbers."""
    plain = (int, float, str, bool, tuple, type(None))
    settings = [
        sorted((name, value) for name, value in vars(part).items() if isinstance(value, plain) and name != "training")
        for part in block.modules()
    ]
    shapes = [(name, tuple(value.shape)) for name, value in block.named_parameters()]
    return f"{type(block).__qualname__} {block} {shapes} {settings}"


def _inside(unit: str, name: str) -> str:
    return name[len(unit) :].removeprefix(".")


def _is_inside(name: str, unit: str) -> bool:
    return not unit or name == unit or name.startswith(f"{unit}.")


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _below(prefix: str, cuts: Cuts) -> Cuts:
    return Cuts(
        {_joined(prefix, name): word for name, word in cuts.words.items()},
        {(_joined(prefix, name), attribute): value for (name, attribute), value in cuts.numbers.items()},
    )


def _outermost(
    units: dict[str, Thing], join: Callable[[Thing, Thing], Thing], move: Callable[[str, Thing], Thing]
) -> dict[str, Thing]:
    """Return units in which inner units have become part of outer ones."""
    found: dict[str, Thing] = {}
    for unit, thing in units.items():
        outer = min((other for other in units if _is_inside(unit, other)), key=len)
        moved = move(_inside(outer, unit), thing)
        found[outer] = join(found[outer], moved) if outer in found else moved
    return found


def _statistics_of(block: nn.Module) -> str:
    """Return why a block's norms forbid pieces of sequences, which no proof would find, or an empty text."""
    norms = [type(part).__name__ for part in block.modules() if getattr(part, "running_mean", None) is not None]
    return f"holds a {norms[0]}, whose statistics would be of a piece of the sequence on each rank" if norms else ""


def _general(name: str) -> str:
    """Return the name of a module with its numbers replaced by ``*``."""
    return re.sub(r"\b\d+\b", "*", name) or "the model"
