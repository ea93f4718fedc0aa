"""Watch that the ranks of a run do not train apart.

In one averaged backward all ranks must use the same weights. So the number of averages is a position that all ranks
share, whatever they do in between: there each rank looks at its weights, publishes their digest, and compares it at the
next one. Looks are due after 1, 2, 4, 8, … averages, and then after every so many that they take a
thousandth of the time. Where no average shows the position, in ``eval()``, before a checkpoint, after updates by hand
and at the end of the run, ranks are compared that have come to the same one.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import Literal, NamedTuple

from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import version_of
from distwrap.group.world import RunPart, World
from distwrap.live_objects import instances
from distwrap.model.checks import in_sync
from distwrap.model.checks.in_sync import ComparedTensor, Comparison, is_power_of_two
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import bound_strategy, handle_of, parameters_of
from distwrap.protocols import Strategy
from distwrap.seeding import mix
from distwrap.supervision.activity import Activity

_SHARE = 0.001  # of the time, which looks may take after the first few
_MOST = 2**20  # averages from one look to the next

# What to do, by what differs.
_SKIPPED = (
    "Either one of these ranks took a step with this optimizer that the other did not (DW302): every rank must take "
    "each step, so let no branch around optimizer.step() depend on numbers of one rank; decide by distwrap.mean(loss), "
    "or by distwrap.agree(flag). Or the optimizers of these ranks have other groups of parameters."
)
_SCHEDULED = (
    "A scheduler that looks at a metric must see the same number on every rank (DW301), as in "
    "scheduler.step(distwrap.mean(loss, count)), and every rank must step its schedulers equally often."
)
_BY_HAND = (
    "Weights that are updated by hand, from autograd.grad or func.grad or in a hook, go past DDP (DW104): "
    "average each gradient before, by distwrap.reduce(gradient, 'mean')."
)
_UNEVEN = (
    "All ranks must start with the same weights (wrap_model() sees to it), average the gradients of everything that "
    "they train (parameters outside of a wrapped model, or added to it later, are not averaged), and take the same "
    "steps with the same learning rate (DW401). A scheduler that looks at a metric needs that of all ranks: "
    "scheduler.step(distwrap.mean(loss, count))."
)


class TrainingPosition(NamedTuple):
    """A position in the training of some tensors; ranks are compared at the same position.

    Attributes:
        generation: how often the ranks had begun to count anew.
        averages: how many there were before the latest one.
        event: at which the tensors were looked at; empty for an average.
        by_hand: how many updates by hand there may have been.
        state: what else must be alike.
    """

    generation: int
    averages: int
    event: Literal["", "by hand", "paused", "end"] = ""
    by_hand: int = 0
    state: tuple[object, ...] = ()

    def in_words(self, unit: str) -> str:
        """Return when that is, for a message; what is counted has the name `unit`."""
        if self.event == "end":
            return "at the end"
        if self.event == "by hand" or self.averages < 0:
            return f"after {self.by_hand} updates by hand"
        return f"after {self.averages} {unit}"


class Watch:
    """Watch over tensors that are trained on several ranks; it decides when to look at them.

    Args:
        world: of the run.
        name: of the tensors, for messages.
        key: of the tensors on the side channel, alike on all ranks.
        ranks: that train them together.

    Attributes:
        key: of the tensors.
        ranks: that train them together.
        generation: how often the averages were counted anew.
        averages: how many averages of their gradients have begun, or steps where nothing tells of averages.
    """

    unit = "averages of gradients"
    way_out = ""

    def __init__(self, world: World, name: str, key: str, ranks: list[int]) -> None:
        self._rank, self._name, self.key, self.ranks = world.placement.rank, name, key, ranks
        self.comparison = Comparison(world, key, ranks, self._message)
        self._spent = 0.0
        self._looks, self.generation = 0, -1
        self.begin_generation()

    @property
    def cost(self) -> float:
        """Seconds that a look takes, on average."""
        return self._spent / max(1, self._looks)

    def begin_generation(self) -> None:
        """Count anew from here, where ranks that took different numbers of averages are together again."""
        self.generation, self.averages, self._due, self._every = self.generation + 1, 0, 2, 1
        self._began = time.monotonic()
        self.comparison.forget()

    def average(self) -> None:
        """Count an average that begins now, in which all ranks use the same weights."""
        self.averages += 1
        if self.averages >= self._due:
            self._look_around()

    def end(self) -> None:
        """Look once more, as the run ends or a call in it."""

    def held(self) -> list[ComparedTensor]:
        """Return the tensors."""
        raise NotImplementedError

    def cause_of(self, difference: str) -> str:
        """Return why this difference came about, and what to do, where what is trained tells; else empty."""
        return ""

    def _publish(self, event: Literal["", "by hand", "paused", "end"], by_hand: int, *state: object) -> None:
        """Look now, and publish; it is compared with ranks on which what is given here is alike."""
        position = TrainingPosition(self.generation, self.averages - 1, event, by_hand, state)
        self.comparison.publish(position, self.held())

    def _look_around(self) -> None:
        began = time.monotonic()
        self.comparison.advance()
        position = self.averages - 1
        time_to_spend = _SHARE * (began - self._began) * self._looks / position
        while self._every < _MOST and self._spent > time_to_spend * self._every:
            self._every *= 2
        if is_power_of_two(position) or position % self._every == 0:
            self._looks += 1
            self._publish("", 0)
        power, multiple = 1 << position.bit_length(), (position // self._every + 1) * self._every
        self._due = self.averages + 1 if self.comparison else min(power, multiple) + 1
        self._spent += time.monotonic() - began

    def _message(self, position: TrainingPosition, difference: str, agreed: TrainingPosition | None) -> str:
        last = f" They last agreed {agreed.in_words(self.unit)}." if agreed is not None else ""
        if "learning rate" in difference:
            cause = _SKIPPED if "does not hold the same tensors" in difference else _SCHEDULED
        else:
            cause = self.cause_of(difference) or (
                _BY_HAND if position.event == "by hand" or not self.averages else _UNEVEN
            )
        return (
            f"rank {self._rank}: {position.in_words(self.unit)} the ranks do not hold the same weights of "
            f"{self._name}: {difference}.{last} {cause}{self.way_out}"
        )


def learning_rates(optimizers: Iterable[Optimizer]) -> list[ComparedTensor]:
    """Return the learning rates of optimizers, to be compared as numbers."""
    return [
        ComparedTensor(f"the learning rate of {type(optimizer).__name__}, group {number}", "", rate)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        if (rate := group.get("lr")) is not None
    ]


def cause_in_closure(optimizer: Optimizer) -> str:
    """Return what to do where an optimizer chooses its steps by what its closure returns; empty where it does not."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None or closure.default is not closure.empty:
        return ""
    return (
        f"{type(optimizer).__name__} chooses its steps by the loss that its closure returns, so the closure must "
        "return the same number on every rank: end it by return distwrap.mean(loss), after loss.backward()."
    )


_FREE_PAUSES = 8  # which may take any time
_WRAPS = 8  # after which a model that is gone has been compared, and is forgotten


class ModelWatch(Watch):
    """Watch over the weights of one wrapped model, and what is trained with it.

    Args:
        model: it is not kept alive; the user's own module in it is, so that it can be looked at when the model is gone.
        drift: of the run.
        name: of the model.
        key: alike on all ranks.
        ranks: that train it together.
        by_steps: whether optimizer steps show how far it has come, since nothing tells of its averages.

    Attributes:
        has_regrouped: whether DDP has begun to agree on groups of gradients, in the first forward after an average.
    """

    def __init__(self, model: nn.Module, drift: Drift, name: str, key: str, ranks: list[int], by_steps: bool) -> None:
        self._model = weakref.ref(model)
        net = unwrap_model(model)
        self._inner = net if net is not model else None
        self._strategy = bound_strategy(model)
        self._probe_parameter = next((p for p in model.parameters() if p.requires_grad), None)
        self._version = self._version_now()
        self._last_seen = self._version, 0  # the probe parameter's, and the averages, as a forward came without one
        self._at_first = [version_of(parameter) - self._version for parameter in net.parameters()]
        self._changes = {0}  # of the probe parameter's version, from one average to the next
        self._stepped: dict[int, weakref.ref[Optimizer]] = {}  # since the last average
        self._forwards: list[ComparedTensor] = []  # of a divided model, before the latest step
        self._by_hand = self._pauses = 0
        self._paused_at = 0.0
        self._by_steps, self._drift = by_steps, drift
        self.has_regrouped = False
        super().__init__(drift.world, name, key, ranks)

    @property
    def begun(self) -> int:
        """Twice the number of averages; one more where the first has been, and DDP's one exchange in a forward too.

        Zero where steps show it, which the run counts: this watch may see more or fewer of them than another rank's,
        on which the model is gone later or sooner.
        """
        return 0 if self._by_steps else 2 * self.averages + (self.averages == 1 and self.has_regrouped)

    def average(self) -> None:
        """Count an average that begins now, in which all ranks use the same weights."""
        version = self._version_now()
        self._changes.add(version - self._version)
        self._version = version
        super().average()
        self._stepped.clear()

    def step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer is about to step."""
        if (
            self._by_steps
            and self._net is not None
            and (bound_strategy(optimizer) is self._strategy or self.trained_by(optimizer))
        ):
            handle = handle_of(self._model())
            self._forwards = [handle.alignment.held()] if handle is not None and handle.alignment is not None else []
            self.average()
        self._stepped[id(optimizer)] = weakref.ref(optimizer)

    def forward_again(self) -> None:
        """Note a forward for which the one before had no average; the weights may have changed in between.

        A change through ``.data`` leaves no trace, so a second one in a row counts too. Inside a ``functional_call``
        the model holds other tensors than its own, which may differ.
        """
        if self._net is None or not any(own is self._probe_parameter for own in self._net.parameters()):
            return
        seen = self._version_now(), self.averages
        if seen[0] != self._last_seen[0] or seen == self._last_seen:
            self._by_hand += 1
            self.comparison.advance()
            if is_power_of_two(self._by_hand):
                self._publish("by hand", self._by_hand, self._drift.averages)
        self._last_seen = seen

    def pause(self) -> None:
        """Look as training pauses, in ``eval()`` or before a checkpoint; it is compared later."""
        began = time.monotonic()
        affordable = self._pauses < _FREE_PAUSES or self.cost < _SHARE * (began - self._paused_at)
        if not self.is_gone and (self.averages or self._by_hand) and affordable:
            self._pauses, self._paused_at = self._pauses + 1, began
            if not self.averages:  # no step will compare what was published before
                self.comparison.advance()
            change = self._version_now() - self._version
            self._publish("paused", self._by_hand, change, self._uneven(), self._drift.averages)
            self._due = self.averages + 1

    def end(self) -> None:
        """Compare once more, when the run or a call in it ends; forget the model if the wrapper is gone.

        Ranks are compared that have taken as many averages, and have both, or neither, changed the weights after the
        last one by more than a step.
        """
        if self._net is None:
            return
        change = self._version_now() - self._version
        usual = "as ever" if change in self._changes else "changed since"
        if not (self.is_gone and self._is_divided):
            self._stepped.clear()  # some are gone by now, on some ranks
            self._publish("end", 0, usual if self.averages > 2 else f"{change} changes", self._uneven())
        if self.is_gone:
            self._inner = self._probe_parameter = None

    def held(self) -> list[ComparedTensor]:
        """Return the learning rates and the weights."""
        assert self._net is not None
        model = self._model()
        held = self._strategy.held(model) if model is not None and self._strategy is not None else ()
        weights = list(held) or ([] if self._is_divided else in_sync.tensors_of(self._net))
        buffers = {name for name, _ in self._net.named_buffers()}
        stepped = [optimizer for held in self._stepped.values() if (optimizer := held()) is not None]
        rates = learning_rates(filter(self.trained_by, stepped))
        return [*rates, *(item for item in weights if item.name not in buffers), *self._forwards]

    def cause_of(self, difference: str) -> str:
        return next(filter(None, map(cause_in_closure, filter(self.trained_by, instances(Optimizer)))), "")

    @property
    def is_gone(self) -> bool:
        """Whether the wrapped model exists no more."""
        return self._model() is None

    @property
    def _is_divided(self) -> bool:
        return self._strategy is not None and self._strategy.shards

    @property
    def _net(self) -> nn.Module | None:
        """The user's own module, as long as it may be looked at."""
        return self._inner if self._inner is not None else self._model()

    def trained_by(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds parameters of the model."""
        own = map(id, self._net.parameters() if self._net is not None else ())
        return not parameters_of(optimizer).keys().isdisjoint(own)

    def _version_now(self) -> int:
        return 0 if self._probe_parameter is None else version_of(self._probe_parameter)

    def _uneven(self) -> int:
        """Return a number for which parameters were changed more often than the probe parameter, as by hand."""
        assert self._net is not None
        uneven = [version_of(parameter) - self._version_now() for parameter in self._net.parameters()]
        return mix(*(now - then for now, then in zip_longest(uneven, self._at_first, fillvalue=0)))


class Drift(RunPart):
    """The watches over all models that one run trains, on one rank."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.watches: list[ModelWatch] = []
        self._gone: deque[list[ModelWatch]] = deque(maxlen=_WRAPS)  # those that went from one wrap to the next
        self._averages_of_gone = self._begun_of_gone = self._generations_of_gone = 0
        self._strategies: list[Strategy] = []  # strategies of models for which steps are counted
        self._steps = 0  # of optimizers with these strategies
        self._names: Counter[str] = Counter()
        world.part(Activity).averages = self._begun

    def _begun(self) -> tuple[int, int]:
        """Return how often averages were counted anew, and what the models have begun; for the channel's thread."""
        begun = self._begun_of_gone + sum(watch.begun for watch in self.watches) + 2 * self._steps
        return self._generations_of_gone + sum(watch.generation for watch in self.watches), begun

    @property
    def averages(self) -> int:
        """Number of averages of all models, which tells when an update by hand was."""
        return self._averages_of_gone + sum(watch.averages for watch in self.watches)

    def watch(self, model: nn.Module, ranks: list[int], *, by_steps: bool = False) -> ModelWatch | None:
        """Watch over a wrapped model from now on; ``None`` where there is no rank to compare with, or no side channel.

        Args:
            model: wrapped.
            ranks: that train it together.
            by_steps: whether optimizer steps show how far it has come, since nothing tells of its averages.
        """
        self._part_with_gone()
        if self.world.channel is None or len(ranks) < 2:
            return None
        kind = type(unwrap_model(model)).__name__
        self._names[kind] += 1
        name = kind if self._names[kind] == 1 else f"{kind} number {self._names[kind]}"
        watch = ModelWatch(model, self, name, f"model {self.world.count('watch over a model')}", ranks, by_steps)
        self.watches.append(watch)
        strategy = bound_strategy(model)
        if by_steps and strategy is not None and strategy not in self._strategies:
            self._strategies.append(strategy)
        return watch

    def step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer is about to step."""
        if self._strategies and bound_strategy(optimizer) in self._strategies:
            self._steps += 1
        for watch in self.watches:
            watch.step(optimizer)

    def pause(self) -> None:
        """Look at all models, as before a checkpoint."""
        for watch in self.watches:
            watch.pause()

    def wait(self) -> None:
        watches = [*self.watches, *chain(*self._gone)]
        for watch in watches:
            watch.end()
        for watch in watches:
            watch.comparison.finish()

    def close(self) -> None:
        self.watches.clear()
        self._gone.clear()

    def _part_with_gone(self) -> None:
        """Look for the last time at models that are gone, and compare those that went before."""
        for watch in chain(*self._gone):
            watch.comparison.advance()
        gone = [watch for watch in self.watches if watch.is_gone]
        for watch in gone:
            watch.end()
            self.watches.remove(watch)
            self._averages_of_gone += watch.averages
            self._begun_of_gone += watch.begun
            self._generations_of_gone += watch.generation
        self._gone.append(gone)
