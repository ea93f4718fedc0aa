"""The strategy zero1: DDP with the optimizer's state divided over the ranks.

Each rank steps some of the parameters, and sends the new weights to all others. The user's own optimizer stays, of any
class that treats each parameter by itself. During its step the gradients of other ranks' parameters are hidden, so
that it skips these parameters and keeps no state for them. After the step the weights are broadcast from their owners,
many in one message.
Source: ZeRO, stage 1, https://arxiv.org/abs/1910.02054
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import foreach, unchanged_versions, version_of
from distwrap.errors import ModelError, OptionError
from distwrap.group.collectives import gather_object
from distwrap.group.optimizer_steps import Closure, OptimizerSteps, Phase, around_closure
from distwrap.group.tensors_apart import as_bytes
from distwrap.group.world import RunPart, World, current_world
from distwrap.model.checks.in_sync import ComparedTensor, tensors_of
from distwrap.model.distributed import AveragingModel, DistributedModel
from distwrap.model.wrapped_models import WrappedModels, bound_strategy, gradients_of, parameters_of
from distwrap.options import Options
from distwrap.protocols import Algorithm
from distwrap.strategies.base import Wrapping
from distwrap.strategies.ddp import DDPStrategy
from distwrap.strategies.optimizer_scope import PUTS_TOGETHER, refuse_scope


class ZeroStrategy(DDPStrategy):
    """Strategy with the same model in each process, and the optimizers' states divided over the processes.

    Args:
        backend: the backend of the process group, as ``"gloo"``.
        **ddp_options: options of ``DistributedDataParallel``, as ``static_graph=True``.

    Raises:
        OptionError: DistributedDataParallel has no such option, or divided optimizers do not allow it.

    Example:
        >>> ZeroStrategy()
        ZeroStrategy()
    """

    shards = True
    steps_parameters = True

    def __init__(self, *, backend: str | None = None, **ddp_options: Any) -> None:
        super().__init__(backend=backend, **ddp_options)
        self._refuse(ddp_options)
        self._refuse_comm(self.comm)

    def check(self, run: Options) -> None:
        self._refuse_comm(run.comm)

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        self._refuse(wrapping.options)
        wrapped = super().prepare_model(model, world, wrapping)
        if isinstance(wrapped, DistributedModel):
            world.part(OptimizerShares).adopt()
        return wrapped

    def wrapper(self, comm: Algorithm | None) -> type[DistributedModel]:
        return _ZeroModel

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        optimizer = super().prepare_optimizer(optimizer, model)
        world = current_world()
        if world.placement.world_size > 1:
            world.part(OptimizerShares).divide(optimizer)
        return optimizer

    def restore_original(
        self, original: nn.Module | Optimizer, prepared: nn.Module | Optimizer, state: dict[str, Any]
    ) -> None:
        if isinstance(original, Optimizer):
            current_world().part(OptimizerShares).release(original)
        super().restore_original(original, prepared, state)

    def held(self, model: nn.Module) -> Iterable[ComparedTensor]:
        options = current_world().part(OptimizerShares).options(model)
        return [*tensors_of(model), *(ComparedTensor(name, "", value) for name, value in options)]

    def is_divided(self, thing: nn.Module | Optimizer) -> bool:
        return self.holders(thing) is not None

    def holders(self, thing: nn.Module | Optimizer) -> Mapping[int, Collection[int]] | None:
        if not isinstance(thing, Optimizer) or (share := current_world().part(OptimizerShares).of(thing)) is None:
            return None
        return share.holders(thing)

    def load_state(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> None:
        if isinstance(thing, Optimizer):
            thing.load_state_dict(state)  # whose hook takes this rank's share
        else:
            super().load_state(thing, state)

    def _refuse(self, options: dict[str, Any]) -> None:
        """Refuse options of DDP that do not allow a division over all ranks."""
        if options.get("process_group") is not None:
            raise OptionError(
                "strategy='zero1' divides over all ranks, so process_group= cannot be given. Leave it out."
            )

    def _refuse_comm(self, comm: Algorithm | None) -> None:
        """Refuse algorithms that need the whole optimizer state on each rank."""
        if comm is not None and comm.needs_optimizer_state:
            raise OptionError(
                f"strategy='zero1' does not go with comm={type(comm).__name__}, which needs all of the optimizer's "
                "state on each rank. Use strategy='ddp' with it."
            )


class _WithoutJoin(AveragingModel):
    """DDP inside a model whose ranks also exchange weights after each step, which ``Join`` does not support."""

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuse torch's ``Join``, in which a rank without data would miss the others' steps."""
        raise ModelError(
            f"rank {current_world().placement.rank}: torch's Join does not go with strategy='zero1', where "
            f"every rank takes part in every step of the optimizer. Loop over distwrap.lockstep(loader) instead."
        )


class _ZeroModel(DistributedModel):
    """Wrapped model whose optimizers are divided."""

    _distwrap_ddp = _WithoutJoin


def _divided(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters whose gradients all ranks have averaged under this strategy."""
    models = current_world().part(WrappedModels)
    averaged = {
        id(parameter)
        for model in models.of_optimizer(optimizer)
        if isinstance(bound_strategy(model), ZeroStrategy) and (gradients := gradients_of(model)) is not None
        for parameter in gradients.averaged()
    }
    return [parameter for key, parameter in parameters_of(optimizer).items() if key in averaged]


_MESSAGE = 16 * 2**20  # most bytes of weights in one broadcast


class OptimizerShare:
    """Share of one optimizer on this rank, made by all ranks together.

    Args:
        optimizer: an optimizer whose step treats each parameter by itself; it is not kept alive.
        world: the world of the run.

    Attributes:
        owners: the rank that steps each divided parameter.
        is_part: whether this rank's optimizer has only a part of the state.
        is_over: whether the run has ended.
    """

    def __init__(self, optimizer: Optimizer, world: World) -> None:
        refuse_scope(optimizer)
        self.rank, self._size = world.placement.rank, world.placement.world_size
        self.owners: dict[nn.Parameter, int] = {}
        self.is_part = self.is_over = False
        self._loads = [0] * self._size
        self._hidden: list[tuple[nn.Parameter, torch.Tensor]] = []
        # In a step: what was there, of each parameter its version, and its gradient with its version.
        self._begun: dict[nn.Parameter, tuple[int, torch.Tensor | None, int]] = {}
        self._versions: AbstractContextManager[object] = nullcontext()
        self._messages: list[list[_Message]] = []
        self._planned: tuple[int, ...] = ()
        self._is_agreed = False
        self._handles = [
            optimizer.register_state_dict_pre_hook(self._refuse_part),
            optimizer.register_load_state_dict_pre_hook(self._of_share),
        ]
        self.plan(optimizer)

    def plan(self, optimizer: Optimizer) -> None:
        """Give each new parameter an owner, and free the state of other ranks' parameters."""
        self._planned = _sizes(optimizer)
        new = [parameter for parameter in _divided(optimizer) if parameter not in self.owners]
        self.owners.update(balanced(new, self._loads))
        held = parameters_of(optimizer)
        self.owners = {parameter: owner for parameter, owner in self.owners.items() if id(parameter) in held}
        self._messages = _messages(self.owners, self._size)
        for other in [each for each in optimizer.state if not self.is_here(each)]:
            del optimizer.state[other]
            self.is_part = True
        self._is_agreed = False

    def is_here(self, parameter: Any) -> bool:
        """Return whether the state of a parameter is on this rank."""
        return self.owners.get(parameter, self.rank) == self.rank

    def holders(self, optimizer: Optimizer) -> dict[int, tuple[int]]:
        """Return the rank that has the state of each divided parameter, by its id."""
        if self._planned != _sizes(optimizer):
            self.plan(optimizer)
        return {id(parameter): (owner,) for parameter, owner in self.owners.items()}

    def end(self, optimizer: Optimizer) -> None:
        """Leave the run. The optimizer works by itself again once it has its whole state."""
        self.is_over = True
        if self.is_part:
            self._handles.append(optimizer.register_step_pre_hook(self._refuse_step))
        else:
            self.release()

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hide other ranks' gradients from a step; return its arguments if they have a closure."""
        if self._begun:
            self._recover(optimizer)
        if self._planned != _sizes(optimizer):
            self.plan(optimizer)
        if not self._is_agreed:
            self._agree(optimizer)
        self._hidden.clear()
        self._versions = unchanged_versions(list(self.owners))
        self._versions.__enter__()
        calls = []

        def of_share(closure: Closure) -> Closure:
            def call() -> Any:
                calls.append(1)
                if len(calls) > 1:
                    raise ModelError(
                        f"rank {self.rank}: {type(optimizer).__name__}.step(closure) calls the closure more than "
                        "once, and in between each rank has updated only its own share of the weights. Use "
                        "strategy='ddp' for this optimizer."
                    )
                loss = closure()
                self._hide()
                return loss

            return call

        given = around_closure(args, kwargs, of_share)
        if given is None:
            self._hide()
        return given

    def _show(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        self._begun.clear()

    def _recover(self, optimizer: Optimizer) -> None:
        """Show what a step has hidden that raised an error, unless the loop has let go of the gradients since.

        Raises:
            ModelError: the step had changed weights, which the other ranks have not got; or gradients were added.
        """
        begun, name = self._begun, type(optimizer).__name__
        if {self.is_here(each) for each in begun if version_of(each) != begun[each][0]} == {True}:  # else: loaded since
            raise ModelError(
                f"rank {self.rank}: the last step of this {name} has changed weights, then raised an error, which the "
                "loop has caught. Under this strategy other ranks have not got these weights, nor this rank theirs: "
                "let such an error end the run, or use strategy='ddp'."
            )
        kept = [(then, version) for each, (_, then, version) in begun.items() if then is not None and each.grad is then]
        if any(version_of(now) != version for now, version in kept):
            raise ModelError(
                f"rank {self.rank}: the last step of this {name} has raised an error, which the loop has caught, and "
                "gradients were added since. Under this strategy those of the other ranks were hidden then. Call "
                "optimizer.zero_grad() after such an error, or use strategy='ddp'."
            )
        if kept:
            self._show()

    def _hide(self) -> None:
        self._begun = {
            each: (version_of(each), each.grad, 0 if each.grad is None else version_of(each.grad))
            for each in self.owners
        }
        for parameter in self.owners:
            if parameter.grad is not None and not self.is_here(parameter):
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def after(self) -> None:
        """Show the hidden gradients again, and send the new weights of this rank's share to the others."""
        self._show()
        for together in self._messages:
            for message in [message.sent(self.rank) for message in together]:
                message.receive()
        # Count one change on every rank, whatever the step did to this rank's share.
        self._versions.__exit__(None, None, None)
        increment_version(list(self.owners))
        self.is_part = self.is_part or any(owner != self.rank for owner in self.owners.values())

    def _agree(self, optimizer: Optimizer) -> None:
        """Check that all ranks have the same division before they exchange by it."""
        mine = [(list(parameter.shape), str(parameter.dtype), owner) for parameter, owner in self.owners.items()]
        for rank, other in enumerate(gather_object(mine)):
            if other != mine:
                pairs = enumerate(zip_longest(mine, other, fillvalue="none"))
                number, (own, its) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
                raise ModelError(
                    f"rank {self.rank}: the parameters of the ranks' {type(optimizer).__name__} differ, or "
                    f"come in another order, so that the optimizer's state cannot be divided: number {number} "
                    f"of the largest is {own} here and {its} on rank {rank}. Make the same optimizer on every rank."
                )
        self._is_agreed = True

    def _refuse_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        raise ModelError(self._over(optimizer))

    def _refuse_part(self, optimizer: Optimizer) -> None:
        if not self.is_part or PUTS_TOGETHER.get():
            return
        if self.is_over:
            raise ModelError(self._over(optimizer))
        raise ModelError(
            f"rank {self.rank}: {type(optimizer).__name__}.state_dict() would return a part, since the optimizer's "
            f"state is divided over {self._size} ranks. Give the optimizer itself to distwrap.save() on every rank: "
            f'save({{"optimizer": optimizer}}, path) writes all of its state, which any strategy can load.'
        )

    def _of_share(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return this rank's part of a full state to load."""
        if self.is_over:
            self.release()
            return None
        if self._planned != _sizes(optimizer):
            self.plan(optimizer)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        saved = [index for group in state["param_groups"] for index in group["params"]]
        others = {index for index, each in zip(saved, held, strict=False) if not self.is_here(each)}
        self.is_part = self.is_part or not others.isdisjoint(state["state"])
        return {**state, "state": {index: each for index, each in state["state"].items() if index not in others}}

    def _over(self, optimizer: Optimizer) -> str:
        return (
            f"rank {self.rank}: this {type(optimizer).__name__} has a part of its state, which was divided over the "
            f"{self._size} ranks of a run that has ended. Save it within the run, by distwrap.save() on every rank, "
            f"and load that into it."
        )


class OptimizerShares(RunPart):
    """Shares of all divided optimizers of a run. An optimizer that was not prepared gets one at its first step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._of: WeakKeyDictionary[Optimizer, OptimizerShare] = WeakKeyDictionary()
        self._others: WeakSet[Optimizer] = WeakSet()
        steps = world.part(OptimizerSteps)
        steps.listen(Phase.HIDE, self._before)
        steps.listen(Phase.SHOW, self._after)

    def release(self, optimizer: Optimizer) -> None:
        """Release an optimizer that has a part of its state, and is about to load all of it."""
        share = self._of.pop(optimizer, None)
        if share is not None:
            share.release()

    def adopt(self) -> None:
        """Plan all shares again, since there is another model whose optimizers are divided."""
        self._others.clear()
        for optimizer, share in self._of.items():
            share.plan(optimizer)

    def divide(self, optimizer: Optimizer) -> None:
        """Make an optimizer's share, if it has parameters to divide."""
        if optimizer not in self._of and _divided(optimizer):
            self._of[optimizer] = OptimizerShare(optimizer, self._world)

    def of(self, optimizer: Optimizer) -> OptimizerShare | None:
        """Return an optimizer's share, if it has one."""
        return self._of.get(optimizer)

    def options(self, model: nn.Module) -> Iterator[tuple[str, float]]:
        """Yield the numbers among the options of a model's optimizers, each with a name.

        A step that computes one of them from all parameters, as D-Adaptation its ``d``, gets another value on each
        rank.
        """
        own = set(map(id, model.parameters()))
        for optimizer in self._of:
            for number, group in enumerate(optimizer.param_groups):
                for name, value in group.items() if not own.isdisjoint(parameters_of(optimizer)) else ():
                    if isinstance(value, (int, float)):
                        yield f"{name!r} of {type(optimizer).__name__}, group {number}", float(value)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if optimizer not in self._of and optimizer not in self._others:
            if isinstance(strategy := bound_strategy(optimizer), ZeroStrategy):
                strategy.prepare_optimizer(optimizer, None)
            if optimizer not in self._of:
                self._others.add(optimizer)
        share = self._of.get(optimizer)
        return None if share is None else share.before(optimizer, args, kwargs)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        share = self._of.get(optimizer)
        if share is not None:
            share.after()

    def close(self) -> None:
        """Let all shares leave the run."""
        for optimizer, share in self._of.items():
            share.end(optimizer)


class _Message:
    """Weights of one owner, type and device that are sent together."""

    def __init__(self, owner: int) -> None:
        self._owner, self._tensors, self.size = owner, list[nn.Parameter](), 0
        self._work: Any = None
        self._flat = torch.empty(0)

    def add(self, parameter: nn.Parameter) -> None:
        self._tensors.append(parameter)
        self.size += parameter.nbytes

    def sent(self, rank: int) -> "_Message":
        """Start to send or receive the weights, and return this message."""
        first, self._is_mine = self._tensors[0], rank == self._owner
        if len(self._tensors) == 1 and first.is_contiguous():
            self._flat, self._is_mine = first.data.view(-1), True  # received in place
        elif self._is_mine:
            self._flat = torch.cat([tensor.data.reshape(-1) for tensor in self._tensors])
        else:
            self._flat = first.data.new_empty(sum(tensor.numel() for tensor in self._tensors))
        self._work = dist.broadcast(as_bytes(self._flat), src=self._owner, async_op=True)
        return self

    def receive(self) -> None:
        """Wait for the weights, and copy them into the parameters."""
        self._work.wait()
        if not self._is_mine:
            parts = self._flat.split([tensor.numel() for tensor in self._tensors])  # type: ignore[no-untyped-call]
            pairs = zip(self._tensors, parts, strict=True)
            foreach("copy_", [each.data for each in self._tensors], [part.view(each.shape) for each, part in pairs])
        self._work, self._flat = None, torch.empty(0)


def balanced(parameters: Iterable[nn.Parameter], loads: list[int]) -> dict[nn.Parameter, int]:
    """Return an owner for each parameter: the largest first, each to the rank with the fewest numbers so far.

    Args:
        parameters: the parameters, in the same order on all ranks.
        loads: the numbers that each rank has; updated in place.

    Example:
        >>> weights = [nn.Parameter(torch.empty(size)) for size in (1, 4, 2, 2)]
        >>> list(balanced(weights, [0, 0]).values())
        [0, 1, 1, 0]
    """
    owners = {}
    for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
        owners[parameter] = loads.index(min(loads))
        loads[owners[parameter]] += parameter.numel()
    return owners


def _messages(owners: Mapping[nn.Parameter, int], size: int) -> list[list[_Message]]:
    """Return the messages for sending weights, in groups that different owners send at the same time."""
    of_owner: list[list[_Message]] = [[] for _ in range(size)]
    last: dict[tuple[int, torch.dtype, torch.device], _Message] = {}
    for parameter, owner in owners.items():
        kind = owner, parameter.dtype, parameter.device
        message = last.get(kind)
        if message is None or message.size + parameter.nbytes > _MESSAGE:
            message = last[kind] = _Message(owner)
            of_owner[owner].append(message)
        message.add(parameter)
    return [[message for message in together if message is not None] for together in zip_longest(*of_owner)]


def _sizes(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(len(group["params"]) for group in optimizer.param_groups)
