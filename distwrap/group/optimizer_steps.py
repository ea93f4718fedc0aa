"""Steps of a run's optimizers, in named phases: the one place that hooks into them.

torch runs hooks on all optimizers before those of one optimizer, and after its step the other way round. What may see
and change gradients must therefore be a hook of the optimizer itself, and stay inside of the user's own hooks.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from distwrap._internals.torch import put_innermost
from distwrap.group.world import RunPart, World

# Called with the optimizer and its step's arguments. Before the step it may return others, as a hook of torch's may.
Listener = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


class Phase(Enum):
    """Phases of a step, in their order; the user's own hooks run after BEGIN and before FINISH."""

    BEGIN = auto()  # measuring begins
    ADOPT = auto()  # the optimizer takes over parameters that a strategy has replaced
    REFUSE = auto()  # of steps that would be wrong
    COMPARE = auto()  # with other ranks
    EXCHANGE = auto()  # of weights, before the step
    HIDE = auto()  # of what this rank does not step
    SHOW = auto()  # again, when the optimizer has stepped, and give the new weights to the other ranks
    FINISH = auto()  # rounding, exchange of weights after the step
    END = auto()  # measuring ends


_BEFORE = (Phase.ADOPT, Phase.REFUSE, Phase.COMPARE, Phase.EXCHANGE, Phase.HIDE)


class OptimizerSteps(RunPart):
    """Listeners to the steps of all optimizers of one run."""

    def __init__(self, world: World) -> None:
        self._listeners: dict[Phase, list[Listener]] = {phase: [] for phase in Phase}
        self._before: list[Listener] = []  # inside of the user's hooks, in the order of the phases
        self._around: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, RemovableHandle]] = WeakKeyDictionary()
        self._handles = [register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._end)]

    def listen(self, phase: Phase, listener: Listener) -> Callable[[], None]:
        """Call a listener in a phase of each step from now on, until the returned function is called."""
        self._listeners[phase].append(listener)
        self._order()

        def stop() -> None:
            self._listeners[phase].remove(listener)
            self._order()

        return stop

    def close(self) -> None:
        """Remove the hooks."""
        for handle in (*self._handles, *(each for around in self._around.values() for each in around)):
            handle.remove()

    def _order(self) -> None:
        self._before = [listener for phase in _BEFORE for listener in self._listeners[phase]]

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        around = self._around.get(optimizer)
        if around is None:
            around = optimizer.register_step_pre_hook(self._inside), optimizer.register_step_post_hook(self._shown)
            self._around[optimizer] = around
        put_innermost(*around)
        return _told(self._listeners[Phase.BEGIN], optimizer, args, kwargs)

    def _inside(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _told(self._before, optimizer, args, kwargs)

    def _shown(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for listener in self._listeners[Phase.SHOW]:
            listener(optimizer, args, kwargs)

    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for phase in (Phase.FINISH, Phase.END):
            for listener in self._listeners[phase]:
                listener(optimizer, args, kwargs)


def _told(listeners: list[Listener], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call listeners before a step, and return its arguments if one of them has replaced these."""
    given = None
    for listener in listeners:
        if (replaced := listener(optimizer, args, kwargs)) is not None:
            given = args, kwargs = replaced
    return given
