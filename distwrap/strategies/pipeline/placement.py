"""Blocks of a model, their division into stages, and the ranks of a pipeline that hold each parameter and buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distwrap._internals.torch import foreach, submodules, version_of
from distwrap._internals.torch_sharding import is_saved
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import Layout
from distwrap.strategies.pipeline.gradients import Gradients
from distwrap.strategies.pipeline.remote import is_here, make_remote, named_tensors, set_buffer
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


@dataclass(frozen=True)
class StageGroup:
    """This rank's place in its pipeline.

    Attributes:
        group: the ranks of the pipeline, in the order of their stages.
        ranks: their global ranks.
        own: the stages of this rank, in order.
        stages: the number of stages.
        device: the device of this rank.
    """

    group: dist.ProcessGroup
    ranks: list[int]
    own: list[int]
    stages: int
    device: torch.device

    def rank_of(self, stage: int) -> int:
        """Return the global rank of a stage."""
        return self.ranks[stage % len(self.ranks)]

    @property
    def last(self) -> int:
        """The global rank of the last stage."""
        return self.rank_of(self.stages - 1)

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.own[-1] == self.stages - 1


class Placement:
    """Places of a model's parameters and buffers; those of other ranks are freed here.

    Args:
        net: the user's model.
        blocks: the blocks of the model.
        group: this rank's place in the pipeline.
        everywhere: names of modules and parameters outside of the blocks that every stage holds.

    Attributes:
        group: this rank's place in the pipeline.
        ranks: by the name of a tensor, the places in the pipeline that hold it.
    """

    def __init__(self, net: nn.Module, blocks: BlockList, group: StageGroup, everywhere: Collection[str]) -> None:
        self._net, self.group, self._place = net, group, dist.get_rank(group.group)
        places = blocks.places(net, everywhere)
        self._stages = places
        self.ranks = {name: {stage % len(group.ranks) for stage in stages} for name, stages in places.items()}
        make_remote(net, [name for name, ranks in self.ranks.items() if self._place not in ranks])
        self._shared = [name for name, _ in net.named_buffers() if len(self.ranks[name]) > 1]
        self._seen = self._look()

    def only_in(self, stage: int) -> set[str]:
        """Return the names of the tensors that no other stage holds."""
        return {name for name, stages in self._stages.items() if stages == {stage}}

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that are trained on this rank."""
        return [parameter for parameter in self._net.parameters() if parameter.requires_grad and is_here(parameter)]

    def holders(self) -> dict[int, list[int]]:
        """Return the ranks of all pipelines that hold each tensor, by the tensor's id."""
        size, everyone = len(self.group.ranks), range(dist.get_world_size())
        return {
            id(tensor): [rank for rank in everyone if rank % size in self.ranks[name]]
            for name, tensor in named_tensors(self._net)
        }

    def first_places(self) -> dict[int, int]:
        """Return the first place in the pipeline that holds each parameter, by the parameter's id."""
        return {id(parameter): min(self.ranks[name]) for name, parameter in self._net.named_parameters()}

    def sum_shared(self, found: Gradients) -> None:
        """Give every rank that holds a parameter the sum of its gradients over the stages."""
        named = self._net.named_parameters()
        several = [each for name, each in named if len(self.ranks[name]) > 1 and each.requires_grad]
        for parameter in self._used(several, found.__contains__, self.group.group):
            grad = (found[parameter] if parameter in found else torch.zeros_like(parameter)).contiguous()
            dist.all_reduce(grad, group=self.group.group)
            if is_here(parameter):
                found[parameter] = grad

    def average(self, layout: Layout) -> None:
        """Average the gradients with the other pipelines, of which some may not have used a parameter.

        As under DDP with ``find_unused_parameters``, a small all-reduce finds the parameters that any of them has used.
        """
        used = self._used(self.trained(), lambda parameter: parameter.grad is not None, layout.group)
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in used]
        for parameter, grad in zip(used, grads, strict=True):
            parameter.grad = grad
        for work in [dist.all_reduce(grad, group=layout.group, async_op=True) for grad in grads]:
            work.wait()
        if grads:
            foreach("div_", grads, float(layout.size))

    def _used(
        self, parameters: list[nn.Parameter], here: Callable[[nn.Parameter], bool], group: dist.ProcessGroup | None
    ) -> list[nn.Parameter]:
        """Return the parameters that any rank of a group has used."""
        if not parameters:
            return []
        used = torch.tensor([float(here(each)) for each in parameters], device=self.group.device)
        dist.all_reduce(used, group=group)
        return [each for each, times in zip(parameters, used.tolist(), strict=True) if times]

    def changed_buffers(self) -> list[float]:
        """Return, for each buffer that several ranks hold, whether this rank has changed it since the last exchange."""
        before, self._seen = self._seen, self._look()
        pairs = zip(self._shared, before, self._seen, strict=True)
        changed = {
            name.rpartition(".")[0] or name for name, old, now in pairs if now[0] is not old[0] or now[1] != old[1]
        }
        # With a count of batches change its module's statistics, of which torch counts no versions.
        paths = [name.rpartition(".")[0] or name for name in self._shared]
        return [float(is_here(now[0]) and path in changed) for path, now in zip(paths, self._seen, strict=True)]

    def share_buffers(self, changed: list[list[float]]) -> None:
        """Give all ranks the buffers that only some of them have changed, from the last of these.

        Args:
            changed: by buffer, what `changed_buffers` has returned on each rank.
        """
        for name, flags in zip(self._shared, changed, strict=True):
            if any(flags) and not all(flags):
                buffer = self._net.get_buffer(name)
                if not is_here(buffer):  # replaced by what another stage has computed
                    buffer = torch.empty_like(buffer)
                    set_buffer(self._net, name, buffer)
                source = max(place for place, flag in enumerate(flags) if flag)
                with torch.no_grad():
                    whole = buffer.detach().contiguous()
                    dist.broadcast(whole, self.group.ranks[source], self.group.group)
                    buffer.copy_(whole)
        self._seen = self._look()

    def sync_buffers(self, layout: Layout, how: str) -> None:
        """Give all pipelines the same buffers: those of the first one, or the mean."""
        for buffer in self._net.buffers() if layout.size > 1 else ():
            if is_here(buffer) and how == "mean" and buffer.is_floating_point():
                dist.all_reduce(buffer, group=layout.group)
                buffer /= layout.size
            elif is_here(buffer):
                dist.broadcast(buffer, group=layout.group, group_src=0)

    def spread_overflow(self) -> None:
        """Make gradients overflow on all ranks if they have on one, so that all stages skip the same step.

        Raises:
            ModelError: a rank has no gradients, so its scaler could not know.
        """
        grads = [parameter.grad for parameter in self.trained() if parameter.grad is not None]
        overflowed = 1.0 - torch.tensor([grad.isfinite().all() for grad in grads]).all().float()
        found = torch.tensor([overflowed, float(not grads)], device=self.group.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if found[1]:
            raise ModelError(
                "a stage has no gradients under precision='fp16': where all parameters of a stage are frozen, it "
                "cannot know whether to skip a step. Train in bf16, or choose stages that each have something to "
                "train: PipelineStrategy(split=[...])."
            )
        for grad in grads if found[0] else ():
            grad.fill_(torch.inf)

    def _look(self) -> list[tuple[torch.Tensor, int]]:
        found = [self._net.get_buffer(name) for name in self._shared]
        return [(each, version_of(each) if is_here(each) else 0) for each in found]
