"""Division of gradients: each gradient is averaged on the rank that steps its parameter, and freed on the others.

DDP passes on its buckets when they are full, and their gradients go to the ranks that own them. Between two backwards
the buckets have no memory.

Source: ZeRO, stage 2, https://arxiv.org/abs/1910.02054, and https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import after_backward, version_of
from distwrap._internals.torch_zero import leave_gradients_alone
from distwrap.devices.kinds import widest
from distwrap.errors import ModelError
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.tensor_exchange import exchange_device
from distwrap.group.world import RunPart, World
from distwrap.model.distributed import DistributedModel
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import gradients_of, parameters_of, routing_of
from distwrap.precision import LossScaling
from distwrap.strategies.optimizer_share import OptimizerShares, balanced, refuse_sparse

_IN_FLIGHT = 2  # buckets


class _Note(NamedTuple):
    """State of an averaged gradient when it was stored."""

    gradient: int  # its id
    version: int

    def is_of(self, gradient: torch.Tensor | None) -> bool:
        return gradient is not None and id(gradient) == self.gradient


class _Pending:
    """Gradients of one bucket that are being sent to their owners."""

    def __init__(self, bucket: GradBucket, owners: dict[nn.Parameter, int], rank: int, used: torch.Tensor | None):
        self._rank, self._used = rank, used
        self._work = [] if used is None else [dist.all_reduce(used, op=dist.ReduceOp.MAX, async_op=True)]
        self._of_owner: dict[int, list[tuple[int, nn.Parameter, torch.Tensor]]] = {}
        parameters = cast("list[nn.Parameter]", bucket.parameters())
        for number, (parameter, gradient) in enumerate(zip(parameters, bucket.gradients(), strict=True)):
            self._of_owner.setdefault(owners[parameter], []).append((number, parameter, gradient))
        self._flat = {}
        for owner in sorted(self._of_owner):
            flat = torch.cat([gradient.reshape(-1) for _, _, gradient in self._of_owner[owner]])
            self._flat[owner] = flat
            self._work.append(dist.reduce(flat, dst=owner, async_op=True))

    def averaged(self) -> tuple[list[tuple[nn.Parameter, torch.Tensor]], bool]:
        """Wait, and return this rank's averaged gradients, and whether all of them are finite."""
        for work in self._work:
            work.wait()
        flat, found, start = self._flat.pop(self._rank, None), [], 0
        self._flat.clear()
        if flat is None:
            return [], True
        for number, parameter, _ in self._of_owner[self._rank]:
            if self._used is None or self._used[number]:
                found.append((parameter, flat[start : start + parameter.numel()].view(parameter.shape)))
            start += parameter.numel()
        return found, bool(flat.sum().isfinite())


class GradientShare:
    """Share of one model's gradients on this rank.

    Args:
        model: a model that was just wrapped; it is not kept alive.
        world: the world of the run.
        known: parameters that already have an owner, as those whose optimizer has stepped.

    Attributes:
        owners: the rank on which each gradient is averaged.
        is_finite: whether all gradients of the last backward are finite, on all ranks.
    """

    def __init__(self, model: DistributedModel, world: World, known: Mapping[nn.Parameter, int]) -> None:
        self.rank, self._size = world.placement.rank, world.placement.world_size
        self._scaling = world.part(LossScaling)
        parameters = gradients_of(model).averaged()
        self.owners = {each: known[each] for each in parameters if each in known}
        loads = [sum(each.numel() for each in self.owners if self.owners[each] == rank) for rank in range(self._size)]
        self.owners.update(balanced([each for each in parameters if each not in known], loads))
        self._refuse(parameters)
        refuse_sparse(unwrap_model(model), "strategy='zero2'")
        ddp = routing_of(model).inner
        self._ddp = ref(ddp)
        self._notes: dict[nn.Parameter, _Note] = {}
        self._averaged: set[nn.Parameter] = set()  # averaged gradients to which nothing was added
        self._pending: deque[_Pending] = deque()
        self._ready: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._is_finite = self.is_finite = True
        self._backwards = 0
        self._buckets: list[torch.UntypedStorage] = []
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        leave_gradients_alone(ddp)
        model.register_comm_hook(self, lambda share, bucket: share.take(bucket))
        self._handles = [parameter.register_hook(self._hook_of(parameter)) for parameter in parameters]

    def end(self) -> None:
        """Remove the hooks, since the model is wrapped again."""
        for handle in self._handles:
            handle.remove()
        self._notes.clear()

    def take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Send a bucket's gradients to their owners, and free them; runs in a backward."""
        if bucket.index() == 0:
            self._pending.clear()  # left from a backward that was broken off
            self._ready, self._buckets, self._is_finite = [], [], True
            after_backward(lambda: after_backward(self._finish))  # after DDP's own end
        ddp, values, parameters = self._ddp(), bucket.buffer(), bucket.parameters()
        values.div_(self._size)
        used = None
        if ddp is not None and (ddp.find_unused_parameters or ddp.static_graph):
            used = torch.tensor([float(each.grad is not None) for each in parameters], device=values.device)
        for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
            if parameter in self._averaged:  # it already is the mean over all ranks
                gradient.mul_(self._size)
            parameter.grad = None
        if len(self._pending) == _IN_FLIGHT:
            self._complete()
        self._pending.append(_Pending(bucket, self.owners, self.rank, used))
        if self._backwards:  # after the first one DDP rebuilds its buckets
            self._buckets.append(values.untyped_storage())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if values.device.type == "cpu" else [values.device]
        )
        done.set_result(values)
        return done

    def note_change(self, change: Any) -> Any:
        """Call a function that changes the averaged gradients equally on all ranks, and return its value."""
        before = {parameter: self._version(parameter) for parameter in self._notes}
        value = change()
        for parameter, version in before.items():
            note = self._notes[parameter]
            self._notes[parameter] = note._replace(version=note.version + self._version(parameter) - version)
        return value

    def hand_out(self) -> None:
        """Allow changes of the averaged gradients until the next backward."""
        self._notes.clear()

    def refuse_changed(self, optimizer: Optimizer) -> None:
        """Refuse to step over changed gradients, as by a clip to the norm of this rank's share.

        Raises:
            ModelError: gradients were changed; the message says how to clip.
        """
        held = parameters_of(optimizer)
        for parameter, note in self._notes.items():
            if id(parameter) in held and parameter.grad is not None:
                changes = self._version(parameter) - note.version if note.is_of(parameter.grad) else 2
                if changes > 1 or (changes == 1 and not self._is_scaled()):  # a scaler has unscaled it
                    raise ModelError(
                        f"rank {self.rank}: gradients were changed between the backward and the step of "
                        f"{type(optimizer).__name__} under strategy='zero2', where each rank has only a share "
                        "of them, so that torch's clip_grad_norm_ would take another norm on each rank (DW105). Use "
                        "distwrap.optimizer_step(optimizer, max_norm=…), which clips by the norm of all "
                        "gradients, or strategy='zero1'."
                    )

    def _refuse(self, parameters: Iterable[nn.Parameter]) -> None:
        kinds = sorted({str(each.dtype) for each in parameters if each.is_complex()})
        if kinds:
            raise ModelError(f"strategy='zero2' takes real parameters, and this model has {kinds[0]}. Use 'zero1'.")

    def _hook_of(self, parameter: nn.Parameter) -> Any:
        held, share = ref(parameter), ref(self)

        def before(gradient: torch.Tensor) -> None:
            mine, own = share(), held()
            if mine is not None and own is not None:
                mine._before_gradient(own)

        return before

    def _before_gradient(self, parameter: nn.Parameter) -> None:
        """Restore the memory of DDP's buckets, and weigh an averaged gradient by all ranks in the next sum."""
        while self._freed:
            storage, size = self._freed.pop()
            storage.resize_(size)
        if parameter.grad is None:
            self._notes.pop(parameter, None)
        if parameter in self._averaged:
            self._averaged.discard(parameter)
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.mul_(self._size)

    def _complete(self) -> None:
        ready, is_finite = self._pending.popleft().averaged()
        self._ready += ready
        self._is_finite = self._is_finite and is_finite

    def _finish(self) -> None:
        """Store this rank's averaged gradients when DDP has finished the backward."""
        while self._pending:
            self._complete()
        ready, self._ready = self._ready, []
        for parameter in self.owners:
            parameter.grad = None
        for parameter, gradient in ready:
            parameter.grad = gradient
        seen = [gradient for _, gradient in ready]
        others = [parameter for parameter, owner in self.owners.items() if owner != self.rank]
        if not ready and others:  # a scaler needs a gradient on each rank; this one is not stepped
            least = min(others, key=lambda parameter: parameter.numel())
            least.grad = torch.zeros_like(least)
            seen = [least.grad]
        finite = torch.tensor(float(self._is_finite), device=exchange_device())
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        self.is_finite = bool(finite.item())
        if not self.is_finite and self._is_scaled():  # makes a scaler skip the step on every rank
            for gradient in seen:
                gradient.fill_(torch.inf)
        self._notes = {parameter: _Note(id(gradient), version_of(gradient)) for parameter, gradient in ready}
        self._averaged = set(self._notes)
        self._freed = [(storage, storage.nbytes()) for storage in self._buckets]
        self._buckets = []
        for storage, _ in self._freed:
            storage.resize_(0)
        self._backwards += 1

    def _is_scaled(self) -> bool:
        return self._scaling.scaler is not None or self._scaling.sees_users_scaler()

    def _version(self, parameter: nn.Parameter) -> int:
        return 0 if parameter.grad is None else version_of(parameter.grad)


class GradientShares(RunPart):
    """Shares of the gradients of all models in a run whose gradients are divided."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._of: WeakKeyDictionary[nn.Module, GradientShare] = WeakKeyDictionary()
        world.part(OptimizerSteps).listen(Phase.REFUSE, self._before)

    def divide(self, model: DistributedModel) -> None:
        """Divide the gradients of a model that was just wrapped, or wrapped again.

        Raises:
            ModelError: it shares parameters with another wrapped model, whose backward would also divide them.
        """
        known = {**self._world.part(OptimizerShares).owners(), **self.owners()}
        for other, share in list(self._of.items()):
            if unwrap_model(other) is unwrap_model(model):
                share.end()
                del self._of[other]
            elif not share.owners.keys().isdisjoint(set(model.parameters())):
                raise ModelError(
                    f"strategy='zero2': {type(unwrap_model(model)).__name__} shares parameters with another wrapped "
                    f"model, so that two backwards would divide their gradients. Wrap one module that has both, or "
                    f"use strategy='zero1'."
                )
        self._of[model] = GradientShare(model, self._world, known)

    def owners(self) -> dict[nn.Parameter, int]:
        """Return the rank that has each divided gradient."""
        return {parameter: owner for share in self._of.values() for parameter, owner in share.owners.items()}

    def hand_out(self, model: nn.Module) -> None:
        """Allow changes of a model's gradients, by one factor on all ranks, until the next backward."""
        for other, share in self._of.items():
            if unwrap_model(other) is unwrap_model(model):
                share.hand_out()

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip gradients by the norm of all gradients on all ranks, and return it; a collective."""
        found = {parameter: gradient for parameter in parameters if (gradient := parameter.grad) is not None}
        owners = self.owners()
        divided, whole = ([found[each] for each in found if (each in owners) is here] for here in (True, False))
        norms = [nn.utils.get_total_norm(gradients).to(exchange_device()) for gradients in (divided, whole)]
        wide = widest(exchange_device())
        square = norms[0].to(wide) ** 2
        dist.all_reduce(square)
        norm = (square + norms[1].to(wide) ** 2).sqrt()
        norm = norm.to(self._world.device, next((gradient.dtype for gradient in found.values()), norm.dtype))

        def change() -> None:
            nn.utils.clip_grads_with_norm_(found, max_norm, norm)

        for share in self._of.values():
            change = _noted(share, change)
        change()
        return norm

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """Return whether any gradient of an optimizer's parameters is not finite, on any rank."""
        held = parameters_of(optimizer)
        of_optimizer = (share for share in self._of.values() if any(id(each) in held for each in share.owners))
        return not all(share.is_finite for share in of_optimizer)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for share in self._of.values():
            share.refuse_changed(optimizer)


def _noted(share: GradientShare, change: Any) -> Any:
    return lambda: share.note_change(change)
