"""Watch that the ranks of a run do not train apart.

In one averaged backward all ranks must use the same weights. So the number of averages is a position that all ranks
share, whatever they do in between: there each rank looks at its weights, tells their digest at the next, and compares
it at the one after that. Looks are due after 1, 2, 4, 8, … averages, and then after every so many that they take a
thousandth of the time. Where no average shows the position, in ``eval()``, before a checkpoint, after updates by hand
and at the end of the run, ranks are compared that have come to the same one.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from itertools import chain, zip_longest

from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import version_of
from distwrap.group.world import RunPart, World
from distwrap.live_objects import instances
from distwrap.model import in_sync
from distwrap.model.drift_causes import cause_in_closure, name_of_unwrapped_tensor, unwrapped_tensors_in_words
from distwrap.model.in_sync import Held
from distwrap.model.transparent import unwrap_model
from distwrap.model.unwrapped import Unwrapped
from distwrap.model.watch import SHARE, Watch, is_power_of_two
from distwrap.model.wrapped_models import WrappedModels, bound_strategy, handle_of, parameters_of
from distwrap.protocols import Strategy
from distwrap.seeding import mix
from distwrap.supervision.activity import Activity

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
        self._unwrapped: dict[str, str] = {}  # of tensors that no wrapped model has, what they are
        self._forwards: list[Held] = []  # of a divided model, before the latest step
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
            if self.comparison:
                self.comparison.advance()
            if is_power_of_two(self._by_hand):
                self._publish("by hand", self._by_hand, self._drift.averages)
        self._last_seen = seen

    def pause(self) -> None:
        """Look as training pauses, in ``eval()`` or before a checkpoint; it is compared later."""
        if self.is_gone:
            return
        began = time.monotonic()
        cost = self._spent / max(1, self._looks)
        moved = self.averages or self._by_hand
        if moved and (self._pauses < _FREE_PAUSES or cost < SHARE * (began - self._paused_at)):
            self._pauses, self._paused_at = self._pauses + 1, began
            if not self.averages:  # no step will compare what was told before
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
        how = usual if self.averages > 2 else f"{change} changes"
        if not (self.is_gone and self._strategy is not None and self._strategy.shards):
            self._stepped.clear()  # some are gone by now, on some ranks
            self._publish("end", 0, how, self._uneven())
        if self.is_gone:
            self._inner = self._probe_parameter = None

    def held(self) -> list[Held]:
        """Return the learning rates, the weights, and what is trained with them that no wrapped model has."""
        assert self._net is not None
        model = self._model()
        divided = self._strategy is not None and self._strategy.shards
        held = self._strategy.held(model) if model is not None and self._strategy is not None else ()
        buffers = {name for name, _ in self._net.named_buffers()}
        weights = list(held) or ([] if divided else in_sync.tensors_of(self._net))
        weights = [item for item in weights if item.name not in buffers]
        stepped = [optimizer for held in self._stepped.values() if (optimizer := held()) is not None]
        optimizers = [optimizer for optimizer in stepped if self.trained_by(optimizer)]
        known = self._drift.known()
        unwrapped_tensors: list[Held] = []
        for optimizer in optimizers:
            own = {
                name_of_unwrapped_tensor(number, optimizer): tensor
                for number, tensor in enumerate(parameters_of(optimizer).values())
                if id(tensor) not in known and tensor.grad is not None
            }
            if not own.keys() <= self._unwrapped.keys():  # now, since they may be gone when ranks are seen to differ
                self._unwrapped |= unwrapped_tensors_in_words(own)
            unwrapped_tensors += [Held(name, "", tensor) for name, tensor in own.items()]
        return [*_learning_rates(optimizers), *weights, *unwrapped_tensors, *self._forwards]

    def cause_of(self, difference: str) -> str:
        unwrapped = next((words for name, words in self._unwrapped.items() if repr(name) in difference), "")
        return unwrapped or cause_in_closure(each for each in instances(Optimizer) if self.trained_by(each))

    @property
    def is_gone(self) -> bool:
        """Whether the wrapped model exists no more."""
        return self._model() is None

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


class UnwrappedTensorWatch(Watch):
    """Watch over what an optimizer holds that is in no wrapped model."""

    unit = "steps"
    way_out = " If it is each rank's own on purpose, say wrap_optimizer(optimizer, apart=True)."

    def __init__(self, optimizer: Optimizer, drift: Drift, name: str, key: str, ranks: list[int]) -> None:
        self.optimizer, self._drift = weakref.ref(optimizer), drift
        super().__init__(drift.world, name, key, ranks)

    def held(self) -> list[Held]:
        """Return the tensors that have had a gradient, and the learning rates if no wrapped model has them too."""
        optimizer = self.optimizer()
        assert optimizer is not None
        held, known = parameters_of(optimizer), self._drift.known()
        rates = [] if held.keys() & known else _learning_rates([optimizer])
        trained = [
            Held(f"tensor {number}", "", tensor)
            for number, (key, tensor) in enumerate(held.items())
            if key not in known and tensor.grad is not None
        ]
        return [*rates, *trained]

    def end(self) -> None:
        """Look once more, where the optimizer is still there."""
        if self.optimizer() is not None:
            self._publish("end", 0)


class Drift(RunPart):
    """The watches over all that one run trains, on one rank.

    Attributes:
        apart: optimizers whose tensors are each rank's own.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._models = world.part(WrappedModels)
        self.watches: list[ModelWatch] = []
        self._gone: deque[list[ModelWatch]] = deque(maxlen=_WRAPS)  # those that went from one wrap to the next
        self._averages_of_gone = self._begun_of_gone = self._generations_of_gone = 0
        self._strategies: list[Strategy] = []  # strategies of models for which steps are counted
        self._steps = 0  # of optimizers with these strategies
        self._beside_models: weakref.WeakKeyDictionary[Optimizer, UnwrappedTensorWatch] = weakref.WeakKeyDictionary()
        self._names: Counter[str] = Counter()
        self.apart: weakref.WeakSet[Optimizer] = weakref.WeakSet()
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
        key = f"model {self.world.count('watch over a model')}"
        watch = ModelWatch(model, self, self._name(kind), key, ranks, by_steps)
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
        if optimizer in self._beside_models:
            self._beside_models[optimizer].average()

    def watch_unwrapped_tensors(self, optimizer: Optimizer) -> None:
        """Watch over what an optimizer holds that is in no wrapped model, where other ranks have one like it."""
        if self.world.channel is not None:
            tensors = parameters_of(optimizer).values()
            kind = f"{type(optimizer).__name__} {mix(*(str(tensor.shape) for tensor in tensors)):x}"
            name = f"what {type(optimizer).__name__} holds outside of wrapped models"
            ranks = list(range(self.world.placement.world_size))
            self._beside_models[optimizer] = UnwrappedTensorWatch(optimizer, self, name, self._name(kind), ranks)

    def known(self) -> set[int]:
        """Return the ids of the parameters of all wrapped models, and of those that are each rank's own on purpose."""
        models = chain(self._models, self.world.part(Unwrapped).local)
        return {id(parameter) for model in models for parameter in model.parameters()}

    def pause(self) -> None:
        """Look at all models, as before a checkpoint."""
        for watch in self.watches:
            watch.pause()

    def wait(self) -> None:
        watches = [*self.watches, *chain(*self._gone), *self._beside_models.values()]
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

    def _name(self, kind: str) -> str:
        self._names[kind] += 1
        return kind if self._names[kind] == 1 else f"{kind} number {self._names[kind]}"


def _learning_rates(optimizers: list[Optimizer]) -> list[Held]:
    return [
        Held(f"the learning rate of {type(optimizer).__name__}, group {number}", "", rate)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        if (rate := group.get("lr")) is not None
    ]
