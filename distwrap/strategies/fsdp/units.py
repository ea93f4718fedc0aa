"""Units of a divided model: the modules that are gathered, used and freed together, and their types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import nn

from distwrap._internals.torch import norm_classes
from distwrap.errors import ModelError, OptionError
from distwrap.precision import InPrecision
from distwrap.wording import unknown_name

Wrap = Literal["auto"] | str | int | Iterable[str] | Callable[[nn.Module], bool]

_LISTS = (nn.ModuleList, nn.Sequential)


def check_wrap(wrap: object) -> None:
    """Refuse a value that does not choose units.

    Raises:
        OptionError: it is not "auto", names of classes, a number of parameters, or a function.
    """
    names = [wrap] if isinstance(wrap, str) else wrap
    is_number = isinstance(wrap, int) and not isinstance(wrap, bool) and wrap > 0
    is_names = isinstance(names, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in names)
    if not (is_number or (is_names and names) or (callable(wrap) and not isinstance(wrap, type))):
        raise OptionError(
            f"FSDPStrategy(wrap={wrap!r}): it is 'auto', names of module classes as ['Block'], a number of parameters "
            f"from which a module is a unit, or a function of a module that returns whether it is one."
        )


def units_of(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    """Return the modules that are units, with inner ones first; the model itself always is one.

    Args:
        model: the user's model.
        wrap: ``"auto"``: blocks of each list of alike blocks, except experts, and other modules as large; names of
            classes; the number of parameters from which a module is a unit, unless it has a unit inside; or a function.

    Raises:
        ModelError: no module is chosen, or one shares a weight with modules outside of it.
    """
    named = [(name, module) for name, module in model.named_modules() if name and _count(module)]
    if wrap == "auto":
        # Each rank's data choose other experts, so experts are gathered on all ranks with the module around them.
        lists = [part for name, part in named if "expert" in name.rpartition(".")[2] and isinstance(part, _LISTS)]
        experts = {id(inner) for part in lists for inner in part.modules()}
        chosen = [block for block in alike_blocks(model) if id(block) not in experts]
        own = {id(parameter) for block in chosen for parameter in block.parameters()}
        mean = len(chosen) and sum(map(_count, chosen)) // len(chosen)
        rest = [module for _, module in named if not any(True for _ in module.children())]
        rest = [module for module in rest if own.isdisjoint(map(id, module.parameters()))]
        chosen += [module for module in rest if mean and _count(module) >= mean and id(module) not in experts]
        chosen = [unit for unit in chosen if not _shared_outside(model, unit)]
    else:
        chosen = _asked_for(named, wrap)
        for unit in chosen:
            if shared := _shared_outside(model, unit):
                names = " and ".join(repr(name) for name, module in named if module is unit)
                raise ModelError(
                    f"wrap={wrap!r} makes {names} a unit, which shares the weight {shared!r} with modules "
                    "outside of it, and modules that share a weight must be in one unit. Choose a module that "
                    "holds both."
                )
    depth = {id(module): number for number, (_, module) in enumerate(named)}
    return sorted({id(unit): unit for unit in chosen}.values(), key=lambda unit: -depth[id(unit)])


def norms_of(net: nn.Module) -> list[nn.Module]:
    """Return the norms that have weights."""
    return [part for part in net.modules() if isinstance(part, norm_classes()) and [*part.parameters(recurse=False)]]


def of_other_types(net: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return modules whose weights have another type than most in their unit, since a unit has one type.

    Raises:
        ModelError: one module has weights of two types.
    """
    holder: dict[int, nn.Module] = {}
    for unit in (net, *reversed(units)):  # outer ones first
        holder.update((id(part), unit) for part in unit.modules())
    trained = [
        (name, part, dtype, sum(p.numel() for p in part.parameters(recurse=False) if p.requires_grad))
        for name, part in net.named_modules()
        for dtype in sorted({p.dtype for p in part.parameters(recurse=False) if p.requires_grad}, key=str)
    ]
    numbers: dict[int, Counter[torch.dtype]] = {}
    for _, part, dtype, number in trained:
        numbers.setdefault(id(holder[id(part)]), Counter())[dtype] += number
    found: dict[torch.dtype, list[nn.Module]] = {}
    for name, part, dtype, _ in trained:
        unit = holder[id(part)]
        if dtype != numbers[id(unit)].most_common(1)[0][0]:
            if part is unit or len({value.dtype for value in part.parameters() if value.requires_grad}) > 1:
                raise ModelError(
                    f"{name or type(net).__name__!r} has weights of {dtype} and others of another type, and "
                    "FSDP averages the gradients of a unit in one type. Put them in a module of their own."
                )
            found.setdefault(dtype, []).append(part)
    return list(found.values())


def computed_in(in_precision: InPrecision, net: nn.Module) -> torch.dtype | None:
    """Return the type of autocast if weights are gathered in it, else ``None``."""
    kind = in_precision.device.type
    with in_precision.context():
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    types = {parameter.dtype for parameter in net.parameters() if parameter.is_floating_point()}
    return dtype if types == {torch.float32} else None


def _asked_for(named: Sequence[tuple[str, nn.Module]], wrap: Wrap) -> list[nn.Module]:
    if isinstance(wrap, int):
        chosen: list[nn.Module] = []
        for _, module in reversed(named):  # inner ones first
            inside = {id(part) for part in module.modules()}
            rest = _count(module) - sum(_count(unit) for unit in chosen if id(unit) in inside)
            if rest >= wrap and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                chosen.append(module)
    elif callable(wrap):
        chosen = [module for _, module in named if wrap(module)]
    else:
        names = {wrap} if isinstance(wrap, str) else set(wrap)
        known = sorted({type(module).__name__ for _, module in named})
        for name in sorted(names):
            if name not in known:
                raise ModelError(unknown_name("module class of the model, in wrap=,", name, known))
        chosen = [module for _, module in named if type(module).__name__ in names]
    lists = [module for module in chosen if isinstance(module, (nn.ModuleList, nn.ModuleDict))]
    if lists or not chosen:
        what = f"a {type(lists[0]).__name__}, which has no forward" if lists else "no module"
        sizes = ", ".join(f"{name} ({_count(module):,})" for name, module in named[:8])
        raise ModelError(
            f"wrap={wrap!r} makes {what} a unit, so that all of the model would be gathered at once. Its modules and "
            f"their numbers of parameters: {sizes}, … Leave wrap at 'auto', or name the class of its blocks."
        )
    return chosen


def alike_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of each list in which most entries have one class and weights.

    Modules inside of a block belong to it, except lists of blocks, as in a stage.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        blocks = [child for child in module.children() if _count(child)] if isinstance(module, _LISTS) else []
        classes = Counter(type(block) for block in blocks)
        kind, number = classes.most_common(1)[0] if classes else (nn.ModuleList, 0)
        alike = [block for block in blocks if type(block) is kind]
        are_layers = not isinstance(module, nn.ModuleList) or not any([*block.children()] for block in alike)
        if number < 2 or issubclass(kind, (nn.ModuleList, nn.ModuleDict)) or (id(module) in inside and are_layers):
            continue
        found += alike
        inside |= {id(part) for block in alike for part in block.modules()}
    return found


def _shared_outside(model: nn.Module, unit: nn.Module) -> str:
    """Return the name of a unit's weight that modules outside of it share, or an empty text."""
    inside = {id(part) for part in unit.modules()}
    own = {id(parameter): name for name, parameter in unit.named_parameters()}
    others = (part for part in model.modules() if id(part) not in inside)
    shared = (own.get(id(value)) for part in others for value in part.parameters(recurse=False))
    return next((name for name in shared if name is not None), "")


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
