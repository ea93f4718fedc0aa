"""Hooks in torch and in wrapped models that start and stop a stopwatch; all of them are taken away again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import after_backward, replaced, waits_for_ranks
from distwrap._internals.torch_data import iterator_class, workers_of
from distwrap._internals.torch_tree import tensors_in
from distwrap.devices.cpus import thread_times
from distwrap.group.optimizer_steps import OptimizerSteps, Phase, around_closure
from distwrap.group.world import World
from distwrap.model.checks.in_sync import is_power_of_two
from distwrap.model.forward_routing import Routing
from distwrap.model.wrapped_models import WrappedModels, handle_of, under_ddp
from distwrap.stopwatch import Part, Stopwatch
from distwrap.supervision.activity import Activity

# Of torch.distributed: functions that return when the other ranks have come.
_BLOCKING = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "recv"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
)


class Instruments:
    """Instruments of one run, on this rank.

    Args:
        world: of the run.
        stopwatch: which they start and stop.

    Attributes:
        stopwatch: which they start and stop.
        samples: number of samples on which was trained in the steps that have ended: in each as many as the model has
            taken that took the fewest, since a discriminator takes each more than once. Of samples that several ranks
            take together, it is this rank's share.
        gradient_bytes: of the weights of the models that have trained.
        workers: of the loader that was asked last; ``None`` if unknown.
        is_ddp: whether DDP averages the gradients of a model.
    """

    def __init__(self, world: World, stopwatch: Stopwatch) -> None:
        self._world, self.stopwatch = world, stopwatch
        self._is_divided = world.placement.world_size > 1
        self._share = world.layout.size / world.placement.world_size  # of a batch that several ranks share
        self._stepped: set[ref[Optimizer]] | None = None  # those that have, since the last step ended
        self._outermost: ref[Optimizer] | None = None  # of those that are stepping, of which one may hold another
        self._steps = 0
        self._queued_before: tuple[float, float | None] = time.monotonic(), None
        self._in_step: dict[int, float] = {}  # samples that each model has trained on in this step
        self.samples = 0.0
        self.gradient_bytes, self.is_ddp = 0, False
        self.workers: int | None = None
        self._placed = ExitStack()
        self._models: WeakSet[nn.Module] = WeakSet()

    def place(self) -> None:
        """Place all of them."""
        placed, activity, models = self._placed, self._world.part(Activity), self._world.part(WrappedModels)
        activity.stopwatch = self.stopwatch
        placed.callback(setattr, activity, "stopwatch", None)
        for model in models:
            self._follow(model)
        models.on_added.append(self._follow)
        placed.callback(models.on_added.remove, self._follow)
        steps = self._world.part(OptimizerSteps)
        placed.callback(steps.listen(Phase.BEGIN, self._before_step))
        placed.callback(steps.listen(Phase.END, self._after_step))
        exchange = self._timed(Part.EXCHANGE)
        timed: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (torch.autograd, "backward", self._in_backward),
            (torch.autograd, "grad", self._timed(Part.BACKWARD)),
            (iterator_class(), "__next__", self._in_loader),
        ]
        if self._is_divided:
            waits = [*((dist, name) for name in _BLOCKING), *waits_for_ranks()]
            timed += [(owner, name, exchange) for owner, name in waits]
        placed.enter_context(replaced([(owner, name, made(getattr(owner, name))) for owner, name, made in timed]))

    def count_from_here(self) -> None:
        """Forget what was counted of steps before."""
        self.samples = 0.0
        self._in_step.clear()
        self._queued_before = time.monotonic(), queued_seconds()

    def queued_share(self) -> float | None:
        """Return for what share of the time since counting began this thread has waited for a CPU.

        ``None`` where nobody tells.
        """
        now, (began, before) = queued_seconds(), self._queued_before
        if now is None or before is None:
            return None
        return min(1.0, (now - before) / max(time.monotonic() - began, 1e-9))

    def look(self) -> None:
        """Note the size and the settings of the models now: none of them may be left when the loop has ended."""
        parameters = {id(p): p for model in self._models for p in model.parameters() if p.requires_grad}
        size = sum(p.numel() * p.element_size() for p in parameters.values())
        self.gradient_bytes = max(size, self.gradient_bytes)
        self.is_ddp |= any(under_ddp(model) is not None for model in self._models)

    def take_away(self) -> None:
        """Take all of them away."""
        self._placed.close()

    def _timed(self, part: Part) -> Callable[[Any], Any]:
        """Return a decorator that times a function as a part."""
        watch = self.stopwatch

        def of(plain: Any) -> Any:
            @wraps(plain)
            def timed(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling() or watch.is_in(part) or not watch.hears():
                    return plain(*args, **kwargs)
                watch.begin(part)
                try:
                    return plain(*args, **kwargs)
                finally:
                    watch.end(part)

            return timed

        return of

    def _in_loader(self, plain: Any) -> Any:
        data, evaluation = (self._timed(part)(plain) for part in (Part.DATA, Part.EVALUATION))

        @wraps(plain)
        def timed(iterator: Any) -> Any:
            if not torch.is_grad_enabled():
                return evaluation(iterator)
            self.workers = workers_of(iterator)
            return data(iterator)

        return timed

    # Models

    def _follow(self, model: nn.Module) -> None:
        if (handle := handle_of(model)) is not None:  # else a strategy of the user's has returned the model as it was
            self._models.add(model)
            handle.routing.put_around(partial(self._in_forward, id(model)))
            self._placed.callback(_take_off, ref(handle.routing))

    def _in_forward(self, model: int, plain: Any) -> Any:
        def between(begin: Any, end: Any) -> Any:
            def timed(*args: Any, **kwargs: Any) -> Any:
                part = begin(model, (args, kwargs))
                try:
                    return plain(*args, **kwargs)
                finally:
                    end(part)

            return timed

        ends = self._begin_forward, self._end_forward
        timed = between(*ends)
        # A model that is compiled is compiled within, and not what measures it.
        compiled = torch.compiler.disable(between(*map(torch.compiler.disable, ends)), recursive=False)  # type: ignore[no-untyped-call]

        @wraps(plain)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (compiled if torch.compiler.is_compiling() else timed)(*args, **kwargs)

        return chosen

    def _begin_forward(self, model: int, inputs: Any) -> Part | None:
        """Begin the part that a forward is; return ``None`` within another, as where a backward recomputes."""
        watch, part = self.stopwatch, Part.FORWARD if torch.is_grad_enabled() else Part.EVALUATION
        if watch.is_in(part) or watch.is_in(Part.BACKWARD) or not watch.hears():
            return None
        if part is Part.FORWARD:
            self._in_step[model] = self._in_step.get(model, 0.0) + self._share * _samples(inputs)
        watch.begin(part)
        return part

    def _end_forward(self, part: Part | None) -> None:
        if part is not None:
            self.stopwatch.end(part)

    # Backwards and steps

    def _in_backward(self, plain: Any) -> Any:
        watch = self.stopwatch

        def own_gradients_done() -> None:
            if watch.is_in(Part.BACKWARD):
                watch.begin(Part.EXCHANGE)

        def queue(gradient: torch.Tensor) -> None:
            after_backward(own_gradients_done)  # before DDP queues its wait for the other ranks

        @wraps(plain)
        def timed(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not watch.hears():
                return plain(tensors, *args, **kwargs)
            if isinstance(tensors, Iterator):  # a look at the first would take it away
                tensors = tuple(tensors)
            is_nested = watch.is_in(Part.BACKWARD)  # as where a checkpoint recomputes, and has a backward of its own
            root = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
            hook = None
            if self._is_divided and isinstance(root, torch.Tensor) and root.requires_grad:
                hook = root.register_hook(queue)  # type: ignore[no-untyped-call]
            if not is_nested:
                watch.begin(Part.BACKWARD)
            try:
                return plain(tensors, *args, **kwargs)
            finally:
                watch.end(Part.EXCHANGE if is_nested else Part.BACKWARD)
                if hook is not None:
                    hook.remove()

        return timed

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.stopwatch.is_open(Part.OPTIMIZER) or not self.stopwatch.hears():
            return None
        self._outermost = ref(optimizer)
        self.stopwatch.begin(Part.OPTIMIZER)
        return around_closure(args, kwargs, self._timed(Part.OWN))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._outermost is None or self._outermost() is not optimizer or not self.stopwatch.hears():
            return
        self.stopwatch.end(Part.OPTIMIZER)
        self._steps += 1
        if is_power_of_two(self._steps):
            self.look()
        if self._stepped is None:
            self._stepped = set()
            self.count_from_here()
            self.stopwatch.begin_first()
        elif ref(optimizer) in self._stepped:
            self._stepped.clear()
            self.samples += min(self._in_step.values(), default=0.0)
            self._in_step.clear()
            self.stopwatch.step()
        self._stepped.add(ref(optimizer))


def queued_seconds() -> float | None:
    """Return the seconds for which this thread has waited for a CPU; ``None`` if the system does not tell."""
    times = thread_times()
    return None if times is None else times[1]


def _samples(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    """Return how many samples a model's inputs have, by the first tensor among them."""
    args, _ = inputs
    first = args[0] if args and isinstance(args[0], torch.Tensor) and args[0].dim() else None
    if first is None:
        first = next((each for each in tensors_in(inputs) if each.dim()), None)
    return 0 if first is None else first.size(0)  # nested ones have no len()


def _take_off(held: ref[Routing]) -> None:
    """Take the hooks off a model, if it still exists."""
    routing = held()
    if routing is not None:
        routing.put_around(None)
