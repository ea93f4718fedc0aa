"""Find the chain of blocks of a model, and divide it into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from distwrap._internals.torch import submodules
from distwrap.errors import ModelError, OptionError
from distwrap.wording import unknown_name


class Chain(NamedTuple):
    """Blocks that a model calls one after the other.

    Attributes:
        names: the names of the blocks.
        blocks: the modules.
        ends: for each stage, the index of the block after its last one.
    """

    names: list[str]
    blocks: list[nn.Module]
    ends: list[int]

    def stage_of(self, name: str) -> int | None:
        """Return the stage of a parameter or buffer; ``None`` if it is in no block."""
        for number, block in enumerate(self.names):
            if name.startswith(f"{block}."):
                return next(stage for stage, end in enumerate(self.ends) if number < end)
        return None


def find_chain(net: nn.Module, stages: int, split: Sequence[str] | None) -> Chain:
    """Find the blocks of a model, and divide them into stages of similar size.

    Args:
        net: the model.
        stages: the number of stages.
        split: the names of the blocks at which the second and later stages begin; ``None`` to choose them.

    Raises:
        ModelError: there is no chain of so many blocks.
        OptionError: `split` names no blocks of one chain, or another number of stages.
    """
    if split is not None:
        return _split_by_names(net, stages, list(split))
    best: tuple[int, Chain] | None = None
    seen = []
    total = _size(net)
    for name, module in net.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module):
            chain = _chain(name, module, [])
            sizes = [_size(block) for block in chain.blocks]
            seen.append(f"{name or type(module).__name__} of {len(sizes)}")
            if len(sizes) >= stages:
                ends, heaviest = _balanced(sizes, stages)
                heaviest += total - sum(sizes)
                if best is None or heaviest < best[0]:
                    best = heaviest, chain._replace(ends=ends)
    if best is None:
        raise ModelError(
            f"strategy='pipeline' found no ModuleList or Sequential of at least {stages} blocks in "
            f"{type(net).__name__}, for {stages} stages; it has {', '.join(seen) or 'none at all'}. Keep the blocks in "
            f"an nn.ModuleList{', take fewer stages' if stages > 2 else ''}, or name the children at which stages "
            f"begin: PipelineStrategy(split=['layer2', ...])."
        )
    return best[1]


def _split_by_names(net: nn.Module, stages: int, split: list[str]) -> Chain:
    if len(split) != stages - 1:
        raise OptionError(f"split={split!r} names the beginnings of {len(split) + 1} stages, and there are {stages}.")
    parent = split[0].rpartition(".")[0]
    modules = dict(net.named_modules(remove_duplicate=False))
    chain = _chain(parent, modules[parent], []) if parent in modules else Chain([], [], [])
    for name in split:
        if name not in chain.names:
            raise OptionError(unknown_name(f"block of {parent or type(net).__name__} in split=", name, chain.names))
    begins = [chain.names.index(name) for name in split]
    if sorted({0, *begins}) != [0, *begins]:
        raise OptionError(
            f"split={split!r}: name each block at which a stage begins once, in order, without the first block."
        )
    return chain._replace(ends=[*begins, len(chain.names)])


def _chain(parent: str, module: nn.Module, ends: list[int]) -> Chain:
    times = Counter(map(id, submodules(module).values()))  # a repeated module, such as an activation, is no block
    children = [(name, child) for name, child in module.named_children() if times[id(child)] == 1]
    prefix = f"{parent}." if parent else ""
    return Chain([prefix + name for name, _ in children], [child for _, child in children], ends)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _balanced(sizes: list[int], stages: int) -> tuple[list[int], int]:
    """Return the ends of non-empty stages whose heaviest is as light as possible, and its weight."""
    count = len(sizes)
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    # best[end] = (heaviest, ends) of the blocks before `end` in as many stages as were processed
    best: dict[int, tuple[int, int, list[int]]] = {end: (sums[end], end, [end]) for end in range(1, count + 1)}
    for stage in range(2, stages + 1):
        best = {
            end: min(
                (max(best[begin][0], sums[end] - sums[begin]), max(best[begin][1], end - begin), [*best[begin][2], end])
                for begin in range(stage - 1, end)
            )
            for end in range(stage, count + 1)
        }
    return best[count][2], best[count][0]
