"""The ranks of a pipeline that hold each parameter and buffer, and what they exchange of those that several hold."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from distwrap._internals.torch import foreach, version_of
from distwrap.errors import ModelError
from distwrap.group.world import Layout
from distwrap.strategies.pipeline.blocks import BlockList
from distwrap.strategies.pipeline.gradients import Gradients
from distwrap.strategies.pipeline.remote import is_here, make_remote, named_tensors, set_buffer


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
        ranks: by the name of a tensor, the places in the pipeline that hold it.
    """

    def __init__(self, net: nn.Module, blocks: BlockList, group: StageGroup, everywhere: Collection[str]) -> None:
        self._net, self._group, self._place = net, group, dist.get_rank(group.group)
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
        size, everyone = len(self._group.ranks), range(dist.get_world_size())
        return {
            id(tensor): [rank for rank in everyone if rank % size in self.ranks[name]]
            for name, tensor in named_tensors(self._net)
        }

    def counted_here(self) -> set[int]:
        """Return the ids of the parameters that this rank counts in a norm; each is counted by one rank."""
        named = self._net.named_parameters()
        return {id(parameter) for name, parameter in named if min(self.ranks[name]) == self._place}

    def sum_shared(self, found: Gradients) -> None:
        """Give every rank that holds a parameter the sum of its gradients over the stages."""
        named = self._net.named_parameters()
        several = [each for name, each in named if len(self.ranks[name]) > 1 and each.requires_grad]
        if not several:
            return
        used = torch.tensor([float(parameter in found) for parameter in several], device=self._group.device)
        dist.all_reduce(used, group=self._group.group)
        for parameter, times in zip(several, used.tolist(), strict=True):
            if times:
                grad = found[parameter] if parameter in found else torch.zeros_like(parameter)
                grad = grad.contiguous()
                dist.all_reduce(grad, group=self._group.group)
                if is_here(parameter):
                    found[parameter] = grad

    def average(self, layout: Layout) -> None:
        """Average the gradients with the other pipelines, of which some may not have used a parameter.

        As under DDP with ``find_unused_parameters``, a small all-reduce finds the parameters that any of them has used.
        """
        parameters = self.trained()
        used = torch.tensor([float(each.grad is not None) for each in parameters], device=self._group.device)
        dist.all_reduce(used, group=layout.group)
        grads = []
        for parameter, times in zip(parameters, used.tolist(), strict=True):
            if times:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                grads.append(parameter.grad)
        for work in [dist.all_reduce(grad, group=layout.group, async_op=True) for grad in grads]:
            work.wait()
        if grads:
            foreach("div_", grads, float(layout.size))

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
                    dist.broadcast(whole, self._group.ranks[source], self._group.group)
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
        found = torch.tensor([overflowed, float(not grads)], device=self._group.device)
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
