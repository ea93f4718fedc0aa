"""The ranks of a pipeline that have each parameter and buffer, and sums of gradients over several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from distwrap._internals.torch import foreach
from distwrap.errors import ModelError
from distwrap.group.world import Layout
from distwrap.strategies.pipeline.absent import is_here, make_absent
from distwrap.strategies.pipeline.blocks import Chain
from distwrap.strategies.pipeline.calls import Call, Latest
from distwrap.strategies.pipeline.gradients import Gradients
from distwrap.strategies.pipeline.relay import Survey
from distwrap.strategies.pipeline.schedule import Line
from distwrap.wording import named_ranks


class Holders:
    """Places of a model's parameters and buffers.

    Tensors in a block are on the rank of its stage. Others are on every rank until the first batch shows which stages
    use them, and then stay only there.

    Args:
        net: the user's model; tensors of other stages are freed.
        chain: the blocks of the model.
        line: this rank's place in the pipeline.

    Attributes:
        ranks: by the name of a tensor, the places in the pipeline that have it.
    """

    def __init__(self, net: nn.Module, chain: Chain, line: Line) -> None:
        self._net, self._line = net, line
        self._all = set(range(len(line.ranks)))
        self._place = dist.get_rank(line.group)
        first: dict[int, str] = {}
        self._loose: set[str] = set()  # in no block
        self.ranks: dict[str, set[int]] = {}
        self._stages: dict[str, set[int]] = {}  # of tensors that are only in blocks
        for name, tensor in self._named():
            name = first.setdefault(id(tensor), name)
            self.ranks.setdefault(name, set())
        for name, tensor in self._named():
            stage, known = chain.stage_of(name), first[id(tensor)]
            if stage is None:
                self._loose.add(known)
            else:
                self.ranks[known].add(stage % len(line.ranks))
                self._stages.setdefault(known, set()).add(stage)
        self._stages = {name: stages for name, stages in self._stages.items() if name not in self._loose}
        self._fixed = {name: set(ranks) for name, ranks in self.ranks.items()}
        self._unsettled = set(self._loose)
        for name in self._loose:
            self.ranks[name] = set(self._all)
        self._shared: Latest[Call, list[str]] = Latest()
        self._free()

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        net = self._net
        return [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers by name, each once; some of them are absent."""
        return {**dict(self._net.named_parameters()), **dict(self._net.named_buffers())}

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that are trained on this rank."""
        return [parameter for parameter in self._net.parameters() if parameter.requires_grad and is_here(parameter)]

    def counted_here(self) -> set[int]:
        """Return the ids of the parameters that this rank counts in a norm; each is counted by one rank."""
        named = self._net.named_parameters()
        return {id(parameter) for name, parameter in named if min(self.ranks[name]) == self._place}

    def is_like(self, other: Holders) -> bool:
        """Return whether two models have the same blocks on the same ranks, and the same other tensors."""
        return self._fixed == other._fixed and self._line.ranks == other._line.ranks

    def settle_as(self, other: Holders) -> None:
        """Place tensors outside of blocks as in a similar model."""
        for name in self._unsettled - other._unsettled:
            self.ranks[name] = set(other.ranks[name])
        self._unsettled &= other._unsettled
        self._free()

    def settle(self, survey: Survey) -> None:
        """Leave tensors outside of blocks to the stages that use them."""
        needed = self._needed(survey)
        for name in self._unsettled & needed.keys():
            self.ranks[name] = needed[name] | self._fixed[name]
        self._unsettled -= needed.keys()
        self._free()

    def _needed(self, survey: Survey) -> dict[str, set[int]]:
        """Return the places in the pipeline that use each tensor."""
        needed: dict[str, set[int]] = {}
        for stage, names in enumerate(survey.needs):
            for name in names:
                needed.setdefault(name, set()).add(stage % len(self._line.ranks))
        return needed

    def check(self, survey: Survey) -> None:
        """Refuse a method for which stages lack tensors.

        Raises:
            ModelError: a stage uses a tensor that only another one has.
        """
        for name, places in self._needed(survey).items():
            lacking = places - self.ranks[name]
            if name in self._stages:  # a block's result from it stays in its stage
                stages = {stage for stage, names in enumerate(survey.needs) if name in names} - self._stages[name]
                lacking |= {stage % len(self._line.ranks) for stage in stages}
            if lacking:
                raise ModelError(
                    f"{name!r} is used by the stage of rank {self._line.ranks[min(lacking)]}, but only the "
                    f"stage of rank {self._line.ranks[min(self.ranks[name])]} holds it, because one of its "
                    "blocks has it, or because the method that ran first used it only there. Call the method "
                    "that trains before others, or move the code that uses it."
                )

    def add_up(self, found: Gradients, call: Call) -> None:
        """Give every rank that has a parameter the sum of its gradients over the stages.

        Args:
            found: this rank's gradients; gradients of parameters that only other ranks have used are added.
            call: the call that computed them; its first step shows which parameters it uses.
        """
        named = dict(self._net.named_parameters())
        several = [name for name in named if len(self.ranks[name]) > 1 and named[name].requires_grad]
        if not several:
            return
        if call not in self._shared:
            used = torch.tensor([int(named[name] in found) for name in several], device=self._line.device)
            dist.all_reduce(used, dist.ReduceOp.MAX, self._line.group)
            self._shared[call] = [name for name, by_any in zip(several, used.tolist(), strict=True) if by_any]
        for name in several:
            if named[name] in found and name not in self._shared[call]:
                raise ModelError(
                    f"rank {dist.get_rank()}: the parameter {name!r} has a gradient now, but had none in the "
                    "first step, and several stages hold it, so that it would differ between them. Let the "
                    "first step use it too."
                )
        for name in self._shared[call]:
            places = sorted(self.ranks[name])
            if self._place in places:
                parameter = named[name]
                grad = found.get(parameter)
                found[parameter] = self._sum(torch.zeros_like(parameter) if grad is None else grad, places)

    def average(self, layout: Layout) -> None:
        """Average the gradients with the other pipelines, of which some may not have used a parameter.

        As under DDP with ``find_unused_parameters``, a small all-reduce finds the parameters that any of them has used.
        """
        parameters = list(self._net.parameters())
        used = torch.tensor([int(parameter.grad is not None) for parameter in parameters], device=self._line.device)
        dist.all_reduce(used, group=layout.group)
        grads = []
        for parameter, times in zip(parameters, used.tolist(), strict=True):
            if times and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                grads.append(parameter.grad)
        for work in [dist.all_reduce(grad, group=layout.group, async_op=True) for grad in grads]:
            work.wait()
        if grads:
            foreach("div_", grads, float(layout.size))

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
        named = self._net.named_parameters()
        trained = set().union(*(self.ranks[name] for name, parameter in named if parameter.requires_grad))
        if idle := sorted(self._all - trained):
            raise ModelError(
                f"{named_ranks([self._line.ranks[place] for place in idle])} under precision='fp16': all "
                "parameters of this stage are frozen, so it cannot know whether to skip a step. Train in bf16, "
                "or choose stages that each have something to train: PipelineStrategy(split=[...])."
            )
        held = [parameter.grad for parameter in self.trained() if parameter.grad is not None]
        finite = [grad.isfinite().all() for grad in held] or [torch.tensor(True, device=self._line.device)]
        overflowed = 1.0 - torch.stack(finite).all().float()
        dist.all_reduce(overflowed, op=dist.ReduceOp.MAX)
        for grad in held if overflowed else ():
            grad.fill_(torch.inf)

    def _sum(self, grad: torch.Tensor, places: list[int]) -> torch.Tensor:
        ranks, group = [self._line.ranks[place] for place in places], self._line.group
        if self._place != places[0]:
            dist.send(grad, ranks[0], group)
            dist.recv(grad, ranks[0], group)
            return grad
        other = torch.empty_like(grad)
        for rank in ranks[1:]:
            dist.recv(other, rank, group)
            grad += other
        for rank in ranks[1:]:
            dist.send(grad, rank, group)
        return grad

    def _free(self) -> None:
        make_absent(
            self._net,
            [
                name
                for name, tensor in self.tensors().items()
                if is_here(tensor) and self._place not in self.ranks[name]
            ],
        )
