"""Find the blocks of a model, divide them into stages, and say which stages hold each of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import nn

from distwrap._internals.torch import submodules
from distwrap._internals.torch_sharding import is_saved
from distwrap.errors import ModelError, OptionError
from distwrap.strategies.pipeline.remote import named_tensors
from distwrap.wording import unknown_name


class BlockList(NamedTuple):
    """Blocks that a model calls one after the other.

    Attributes:
        names: the names of the blocks.
        blocks: the modules.
        ends: for each stage, the index of the block after its last one.
    """

    names: list[str]
    blocks: list[nn.Module]
    ends: list[int]

    def of_stage(self, stage: int) -> range:
        """Return the indices of a stage's blocks."""
        return range(self.ends[stage - 1] if stage else 0, self.ends[stage])

    def places(self, net: nn.Module, everywhere: Collection[str] = ()) -> dict[str, set[int]]:
        """Return the stages that hold each parameter and buffer, by each of its names.

        What is in a block is in its stage. Of the rest, the first stage holds what is registered before the blocks, and
        the last one what is registered after them. Buffers that no state dict has, what is `everywhere`, and what
        belongs to the modules around the blocks are in every stage.

        Raises:
            OptionError: there is nothing of a name in `everywhere`.
        """
        order = [path for path, _ in net.named_modules(remove_duplicate=False)]
        parameters = {name for name, _ in net.named_parameters(remove_duplicate=False)}
        for name in everywhere:
            if name not in order[1:] and name not in parameters:
                raise OptionError(unknown_name("module or parameter in everywhere=", name, [*order[1:], *parameters]))
        stages = {
            name: stage for stage in range(len(self.ends)) for name in (self.names[n] for n in self.of_stage(stage))
        }
        held: dict[int, set[int]] = {}
        named = named_tensors(net)
        for name, tensor in named:
            path, _, last = name.rpartition(".")
            block = next((block for block in stages if name.startswith(f"{block}.")), None)
            around = not path or self.names[0].startswith(f"{path}.")
            if block is not None:
                found = {stages[block]}
            elif (
                around
                or not is_saved(net.get_submodule(path), last)
                or any(f"{name}.".startswith(f"{each}.") for each in everywhere)
            ):
                found = set(range(len(self.ends)))
            else:
                found = {0 if order.index(path) < order.index(self.names[0]) else len(self.ends) - 1}
            held.setdefault(id(tensor), set()).update(found)
        return {name: held[id(tensor)] for name, tensor in named}


def find_blocks(net: nn.Module, stages: int, split: Sequence[str] | None) -> BlockList:
    """Find the blocks of a model, and divide them into stages.

    Args:
        net: the model.
        stages: the number of stages.
        split: the names of the blocks at which the second and later stages begin; ``None`` to divide the list with the
            most parameters into stages of similar size.

    Raises:
        ModelError: there is no list of so many blocks.
        OptionError: `split` names no blocks of one parent, or another number of stages.
    """
    if split is not None:
        return _split_by_names(net, stages, list(split))
    lists = [
        _children(name, module)
        for name, module in net.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module)
    ]
    fitting = [each for each in lists if len(each.names) >= stages]
    if not fitting:
        seen = ", ".join(f"{each.names[0].rpartition('.')[0]!r} of {len(each.names)}" for each in lists if each.names)
        raise ModelError(
            f"strategy='pipeline' found no ModuleList or Sequential of at least {stages} blocks in "
            f"{type(net).__name__}, for {stages} stages; it has {seen or 'none at all'}. Keep the blocks in "
            f"an nn.ModuleList{', take fewer stages' if stages > 2 else ''}, or name the children at which stages "
            f"begin: PipelineStrategy(split=['layer2', ...])."
        )
    best = max(fitting, key=lambda each: sum(map(_size, each.blocks)))
    return best._replace(ends=_balanced([_size(block) for block in best.blocks], stages))


def _split_by_names(net: nn.Module, stages: int, split: list[str]) -> BlockList:
    if len(split) != stages - 1:
        raise OptionError(
            f"split={split!r} names the beginnings of {len(split) + 1} stages, and there are {stages}: name "
            f"{stages - 1}, without the first stage's, which begins with the first block."
        )
    parent = split[0].rpartition(".")[0]
    modules = dict(net.named_modules(remove_duplicate=False))
    if parent not in modules:
        lists = [name for name, module in modules.items() if isinstance(module, (nn.ModuleList, nn.Sequential))]
        raise OptionError(unknown_name("list of blocks in split=", parent, lists))
    found = _children(parent, modules[parent])
    for name in split:
        if name not in found.names:
            raise OptionError(unknown_name(f"block of {parent or type(net).__name__} in split=", name, found.names))
    begins = [found.names.index(name) for name in split]
    if sorted({0, *begins}) != [0, *begins]:
        raise OptionError(
            f"split={split!r}: name each block at which a stage begins once, in order, without the first block."
        )
    return found._replace(ends=[*begins, len(found.names)])


def _children(parent: str, module: nn.Module) -> BlockList:
    times = Counter(map(id, submodules(module).values()))  # a repeated module, such as an activation, is no block
    children = [(name, child) for name, child in module.named_children() if times[id(child)] == 1]
    prefix = f"{parent}." if parent else ""
    return BlockList([prefix + name for name, _ in children], [child for _, child in children], [])


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _balanced(sizes: list[int], stages: int) -> list[int]:
    """Return the ends of stages, each where its share of all parameters is nearest, with at least one block each."""
    ends, total, weighty = [0], sum(sizes), sum(sizes) > 0
    for stage in range(1, stages):
        goal = total * stage / stages if weighty else len(sizes) * stage / stages
        sums = [sum(sizes[:end]) if weighty else end for end in range(len(sizes) + 1)]
        fitting = range(ends[-1] + 1, len(sizes) - (stages - stage) + 1)
        ends.append(min(fitting, key=lambda end: abs(sums[end] - goal)))
    return [*ends[1:], len(sizes)]
