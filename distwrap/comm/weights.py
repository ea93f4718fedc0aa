"""Exchange of the weights of replicas that train on their own, around the optimizer's steps.

If the algorithm is hierarchical, a node is one replica: its ranks average gradients as under DDP.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar
from weakref import WeakMethod

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import foreach, version_of
from distwrap.checks import whole
from distwrap.comm.base import Algorithm, Link, Traffic, option, real_numbers
from distwrap.comm.exchange import Exchange, RunExchanges
from distwrap.errors import ModelError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.world import RunPart, World, active_world, current_world, say
from distwrap.model.buffers import let_buffers_differ, sync_buffers
from distwrap.model.checks.in_sync import ComparedTensor, Comparison
from distwrap.model.distributed import DistributedModel
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels, bound_strategy, handle_of, parameters_of, under_ddp
from distwrap.precision import LossScaling
from distwrap.supervision.activity import Activity

_FEW_BY_HAND, _MOST_BY_HAND = 2, 32  # changes by hand in a row: before any step, and at any time
_STEPS_TO_COMPARE = 64  # steps for slower ranks to publish their weights; else at the end


@dataclass(frozen=True, kw_only=True)
class WeightAlgorithm(Algorithm):
    """Algorithm in which ranks hold different weights, and average them now and then.

    Args:
        warmup_steps: optimizer steps that average gradients, as under DDP.

    Attributes:
        exchange_class: the class of the exchange of one model; each subclass has its own.
    """

    warmup_steps: int = option(0, whole(0))
    same_weights: ClassVar[bool] = False
    needs_optimizer_state: ClassVar[bool] = True
    exchange_class: ClassVar[type[WeightExchange[Any]]]

    def attach(self, model: DistributedModel, world: World) -> WeightExchange[Any]:
        return self.exchange_class(self, model, world)


class FlatWeights:
    """Parameters that are read and written as one tensor.

    Args:
        parameters: parameters of floating-point or complex types, in the same order on every rank. A complex number
            counts as two.

    Attributes:
        dtype: the type of that tensor: float64 if a parameter has it, else float32.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in self.parameters)
        self.dtype = torch.float64 if double else torch.float32

    def read(self) -> torch.Tensor:
        """Return a copy of the weights."""
        parts = self._parts()
        flat = torch.empty(sum(part.numel() for part in parts), dtype=self.dtype, device=parts[0].device)
        foreach("copy_", _views(flat, parts), parts)
        return flat

    def write(self, flat: torch.Tensor) -> None:
        """Set the weights."""
        parts = self._parts()
        foreach("copy_", parts, _views(flat, parts))

    def _parts(self) -> list[torch.Tensor]:
        return [real_numbers(parameter.detach()) for parameter in self.parameters]


def _views(flat: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    shares = torch.split(flat, [part.numel() for part in parts])
    return [share.view(part.shape) for share, part in zip(shares, parts, strict=True)]


W = TypeVar("W", bound=WeightAlgorithm)


class WeightExchange(Exchange[W]):
    """Exchange of one model's weights, around the steps of its optimizers.

    In a step each weight changes at most once, by one of several optimizers. The step ends when as many weights have
    changed as in the step before (at first: all), or when a weight is about to change again.

    Attributes:
        everyone: the link between all ranks.
        weights: the trained weights of the model.
        steps: the number of steps so far.
        alike: whether all ranks now hold the same weights, as far as this rank knows.
    """

    def __init__(self, algorithm: W, model: DistributedModel, world: World) -> None:
        super().__init__(algorithm, model, world)
        everyone = self.link
        if self.node is not None:
            everyone = self.between(world, list(range(self.world_size)), crosses_nodes=self.nnodes > 1)
        assert everyone is not None
        self.everyone = everyone
        self.steps, self.alike = 0, True
        self._begun = False
        net = unwrap_model(model)
        self._kind = type(net).__name__
        self._named = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
        self.weights = FlatWeights([parameter for _, parameter in self._named])
        self._places = {id(parameter): place for place, parameter in enumerate(self.weights.parameters)}
        self._stepped: frozenset[int] = frozenset()  # indices of the weights that have changed in this step
        self._usual = frozenset(self._places.values())  # and in the step before
        self._latest, self._held = 0, self._stepped  # the last optimizer that began a step (id), its indices
        self._by_hand, self._seen = 0, ""
        self._comparison: Comparison[str] | None = None
        if world.channel is not None:
            key, everybody = f"exchange {world.count('exchange of weights')}", list(range(self.world_size))
            self._comparison = Comparison(world, key, everybody, self._apart)
        hook = WeakMethod(self._on_gradient)
        self._handles: list[Any] = [
            net.register_load_state_dict_post_hook(_after_load),  # type: ignore[no-untyped-call]
            self.weights.parameters[-1].register_hook(lambda gradient: (found := hook()) and found()),  # type: ignore[no-untyped-call]
        ]
        world.part(WeightExchanges)  # acts around the steps from now on
        self._tell_model()

    # For subclasses, on every rank, in the training thread

    def begin(self) -> None:
        """Prepare for the first step without averaged gradients, when all ranks hold the same weights."""

    def before_step(self) -> None:
        """Act before an optimizer step."""

    @abstractmethod
    def after_step(self, step: int) -> None:
        """Act after an optimizer step; `step` counts from 1 after the warm-up."""

    def settle(self) -> None:
        """Finish pending exchanges together with the other ranks; weights may change."""

    def loaded(self) -> None:
        """Act after ``load_state_dict`` of the model; training continues from its new weights."""

    def brought_together(self) -> None:
        """Act when all ranks hold the same weights; training continues from them."""

    # Steps

    def before(self, optimizer: Optimizer) -> None:
        """Act before the step of any optimizer."""
        keys = parameters_of(optimizer) if self.model is not None else ()
        held = frozenset(self._places[key] for key in keys if key in self._places)
        if held:
            self._latest, self._held = id(optimizer), held
        if not self._stepped.isdisjoint(held):
            self._end_step()
        if held and not self._stepped and self.steps >= self.algorithm.warmup_steps:
            if not self._begun:
                self._begun = True
                weights = [ComparedTensor(name, "", parameter) for name, parameter in self._named]
                self.compare(f"before step {self.steps + 1}", weights)
                self.begin()
            self.before_step()

    def after(self, optimizer: Optimizer) -> None:
        """Act after the step of any optimizer."""
        if self._latest != id(optimizer):  # it holds no weights, or its step was counted by an inner one
            return
        self._latest = 0
        self._stepped, self._by_hand, self._seen = self._stepped | self._held, 0, ""
        self.alike = self.alike and self.steps < self.algorithm.warmup_steps
        if self._stepped >= self._usual:
            self._end_step()

    def _end_step(self) -> None:
        self._usual, self._stepped = self._stepped, frozenset()
        self.steps += 1
        if self.steps > self.algorithm.warmup_steps:
            self.after_step(self.steps - self.algorithm.warmup_steps)
        if self._comparison and self.steps >= _STEPS_TO_COMPARE and self.steps & (self.steps - 1) == 0:
            self._comparison.advance()
        self._tell_model()

    def compare(self, position: str, held: list[ComparedTensor]) -> None:
        """Compare tensors that must be equal on all ranks at a position; does not wait for other ranks."""
        if self._comparison is not None:
            self._comparison.publish(position, held)

    def _apart(self, position: str, difference: str, agreed: str | None) -> str:
        return (
            f"rank {self.rank}: {position} the ranks do not hold the same weights of {self._kind}, from "
            f"which {type(self.algorithm).__name__} starts: {difference}. Weights that are loaded, or set "
            "by hand, must be the same on every rank."
        )

    def _on_gradient(self) -> None:
        """Count gradients before which the weights were changed without an optimizer; runs in a backward."""
        weight = self.weights.parameters[-1]
        seen = str(version_of(weight)) if self.steps else f"{version_of(weight)} {weight.detach().sum().item()}"
        self._by_hand += self._seen not in ("", seen)
        self._seen = seen
        if self._by_hand >= _MOST_BY_HAND:
            self._refuse_updates_by_hand()

    def wait(self) -> None:
        """Check the weights at the end of the run, or of a call in it.

        Raises:
            ModelError: ranks started with different weights, or weights were updated by hand.
        """
        if self._comparison is not None:
            self._comparison.finish()
        self._refuse_updates_by_hand()

    def _refuse_updates_by_hand(self) -> None:
        """Refuse weights that changed between gradients without a step of an optimizer."""
        never = not (self.steps or self._stepped) and self._by_hand >= _FEW_BY_HAND
        if never or self._by_hand >= _MOST_BY_HAND:
            raise ModelError(
                f"rank {self.rank}: the weights were changed by hand after {self._by_hand} gradients in a row, and no "
                f"torch.optim.Optimizer has stepped. {type(self.algorithm).__name__} brings the ranks together around "
                f"the steps of optimizers, so that it does nothing here. Let an optimizer step, or leave comm= out and "
                f"average each gradient, by distwrap.reduce(gradient, 'mean')."
            )

    def _tell_model(self) -> None:
        """Keep DDP's reducer out of the backward once gradients are no longer averaged."""
        ddp: Any = under_ddp(self.model)
        if ddp is not None:
            ddp.trains_alone = self.node is None and self.steps >= self.algorithm.warmup_steps

    def note_load(self) -> None:
        """Act on a ``load_state_dict`` of the model."""
        self._by_hand, self._seen = 0, ""
        self.loaded()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state beside weights and optimizer; all ranks load that of rank 0."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, with weights that are the same on all ranks."""
        self.steps, self._begun, self._stepped = state["steps"], False, frozenset()
        self._tell_model()

    # Gradients, in the warm-up or inside a node

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        link = self.everyone if self.steps < self.algorithm.warmup_steps else self.node
        assert link is not None
        values = bucket.buffer()
        return self.engine.submit(partial(_averaged, link, values), otherwise=values)

    # Weights

    def among_replicas(self, work: Callable[[Link, torch.Tensor], None], values: torch.Tensor) -> torch.Tensor:
        """Run some work on `values` between the replicas, and return them; a node gets its first rank's result."""
        if self.link is not None:
            work(self.link, values)
        if self.node is not None:
            self.node.from_first(values)
        return values

    def exchange_weights(self, work: Callable[[Link, torch.Tensor], None]) -> None:
        """Replace the weights by the result of some work between the replicas, and wait for it."""
        self.weights.write(self.engine.call(partial(self.among_replicas, work, self.weights.read())))

    def consolidate(self) -> torch.Tensor:
        """Give all ranks the mean of their weights, and return this rank's own; a collective."""
        self.settle()
        own = self.weights.read()
        self.weights.write(self.engine.call(partial(_averaged, self.everyone, own.clone())))
        self.alike = True
        return own

    def restore(self, own: torch.Tensor) -> None:
        """Set this rank's own weights again."""
        self.weights.write(own)
        self.alike = False

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        super().close()


class WeightExchanges(RunPart):
    """Exchanges of weights of a run, in the order in which the models were wrapped; they act around optimizer steps."""

    def __init__(self, world: World) -> None:
        self._all = world.part(RunExchanges)
        steps = world.part(OptimizerSteps)
        steps.listen(Phase.EXCHANGE, self._before_step)
        steps.listen(Phase.FINISH, self._after_step)
        world.part(LossScaling).on_skipped.append(self._skipped_step)

    @property
    def known(self) -> list[WeightExchange[Any]]:
        """Those that are not closed."""
        return [exchange for exchange in self._all.known if isinstance(exchange, WeightExchange)]

    def wait(self) -> None:
        for exchange in self.known:
            exchange.wait()

    def settle(self) -> None:
        for exchange in self.known:
            exchange.settle()

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each exchange of weights without weights and optimizers, one dict for each model."""
        return [{"algorithm": _name(exchange), **exchange.state_dict()} for exchange in self._held()]

    def load_states(self, states: list[dict[str, Any]]) -> None:
        """Load the states of a checkpoint. If the algorithm has changed, print a line and leave them out."""
        exchanges = self._held()
        saved, present = [state["algorithm"] for state in states], [_name(exchange) for exchange in exchanges]
        if saved == present:
            for exchange, state in zip(exchanges, states, strict=True):
                exchange.load_state_dict(state)
        elif saved:
            goes_on = ", ".join(present) or "another comm="
            say(
                f"this run was saved with {', '.join(saved)} and goes on with {goes_on}: the count of steps "
                "and the outer momentum start from zero. To keep them, wrap the same models with the same "
                "comm= before load()."
            )

    def _held(self) -> list[WeightExchange[Any]]:
        if len(self.known) > 1:
            gc.collect()  # an unused model may still exist on one rank and not on another
        return [exchange for exchange in self.known if exchange.model is not None]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for exchange in self.known:
            exchange.before(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for exchange in self.known:
            exchange.after(optimizer)

    def _skipped_step(self, optimizer: Optimizer) -> None:
        """Count a step that fp16 has skipped on this rank, as other ranks may have taken it."""
        self._before_step(optimizer, (), {})
        self._after_step(optimizer, (), {})


def _name(exchange: WeightExchange[Any]) -> str:
    return type(exchange.algorithm).__name__


def _after_load(net: nn.Module, keys: object) -> None:
    """Tell a model's exchange that weights were loaded. A function, since copies of a module share its hooks."""
    world = active_world()
    for exchange in world.part(WeightExchanges).known if world is not None else ():
        if exchange.model is not None and unwrap_model(exchange.model) is net:
            exchange.note_load()


def _averaged(link: Link, values: torch.Tensor) -> torch.Tensor:
    link.mean(values)
    return values


class Consolidated(AbstractContextManager[None]):
    """Mean of all ranks' weights in a model; leaving the ``with`` restores each rank's own weights.

    Args:
        exchange: the model's exchange; ``None`` if all ranks hold the same weights.
    """

    def __init__(self, exchange: WeightExchange[Any] | None) -> None:
        self._exchange = None
        if exchange is not None and exchange.model is not None:
            self._exchange, self._own = exchange, exchange.consolidate()
            self._buffers = [(buffer, buffer.clone()) for buffer in exchange.model.buffers()]
            sync_buffers(exchange.model, "mean")
            exchange.brought_together()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            with torch.no_grad():
                for buffer, own in self._buffers:
                    buffer.copy_(own)
            if exchange.model is not None:
                let_buffers_differ(exchange.model)
            exchange.restore(self._own)


def consolidate(model: nn.Module) -> Consolidated:
    """Give every rank the mean of all ranks' weights and buffers, to evaluate, save or return them; a collective.

    It acts under algorithms of ``comm=`` whose ranks hold different weights, as ``local_sgd``, ``diloco``, ``async``
    and ``decentralized``; with all others, and in a single process, it does nothing. After a plain call the ranks keep
    the mean. Within a ``with`` they have the mean, and afterwards each rank continues with its own weights. Under
    ``strategy="hivemind"`` all ranks take the newest weights that the peers have averaged, and keep them.

    Args:
        model: the wrapped model.

    Raises:
        CollectiveInRankZeroError: only some ranks call this.

    Example:
        >>> model = wrap_model(nn.Linear(1, 1))
        >>> with consolidate(model):
        ...     weights = model.state_dict()
    """
    check_collectives_allowed("consolidate()")
    current_world().part(Activity).record("consolidate")
    exchange: Any = _exchange_of(model)
    strategy = bound_strategy(model)
    if strategy is not None:
        strategy.consolidate(model)
    return Consolidated(None if exchange is None or exchange.algorithm.same_weights else exchange)


def pause(model: nn.Module) -> AbstractContextManager[None]:
    """Stop the averaging of ``comm="async"`` within a ``with``; all ranks must enter and leave it.

    Use it for work that takes long between two steps, as an evaluation, because the averaging of the other ranks would
    wait for this rank's next step. With other algorithms it does nothing.

    Args:
        model: the wrapped model.

    Example:
        >>> with pause(wrap_model(nn.Linear(1, 1))):
        ...     pass
    """
    check_collectives_allowed("pause()")
    exchange = _exchange_of(model)
    return nullcontext() if exchange is None else exchange.paused()


def traffic(model: nn.Module) -> Traffic:
    """Return what this rank has sent for a model so far; zeros if the model was wrapped without ``comm=``.

    Args:
        model: the wrapped model.

    Example:
        >>> traffic(wrap_model(nn.Linear(1, 1))).sent
        0
    """
    exchange = _exchange_of(model)
    return exchange.traffic if exchange is not None else Traffic()


def _exchange_of(model: nn.Module) -> Exchange[Any] | None:
    """Return the exchange of a wrapped model, also if the model was compiled afterwards."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            "consolidate(), pause() and traffic() take the model that wrap_model() returned, not a "
            f"{type(model).__name__}."
        )
    net = unwrap_model(model)
    for wrapped in current_world().part(WrappedModels):
        if unwrap_model(wrapped) is net and (handle := handle_of(wrapped)) is not None and handle.exchange:
            return handle.exchange  # type: ignore[no-any-return]
    return None
