"""Steps of a run's optimizers, in named phases: the one place that hooks into them.

torch runs hooks on all optimizers before those of one optimizer, and after its step the other way round. What may see
and change gradients must therefore be a hook of the optimizer itself, and stay inside of the user's own hooks.

Where a class calls the step of its parent, torch runs all hooks for both. That is one step: what is hidden is shown
after the parent's, whose caller may go on with the new weights, and the other phases are those of the whole.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum, auto
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from distwrap._internals.torch import hooks_beside, is_within_own_step
from distwrap.group.world import RunPart, World

# Called with the optimizer and its step's arguments. Before the step it may return others, as a hook of torch's may.
Listener = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


Closure = Callable[..., Any]


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a step is given a closure, by its arguments with the optimizer."""
    return any(map(callable, (*args[1:], *kwargs.values())))


def around_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], around: Callable[[Closure], Closure]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return a step's arguments with another closure in the place of the one given; ``None`` without one."""
    if not has_closure(args, kwargs):
        return None
    given = tuple(around(each) if callable(each) else each for each in args[1:])
    return (args[0], *given), {name: around(each) if callable(each) else each for name, each in kwargs.items()}


def steps_as_torch(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's class steps by torch's own code, which calls no step of the same optimizer."""
    return bool(inspect.unwrap(type(optimizer).step).__module__.startswith("torch."))


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


_INNER = (Phase.ADOPT, Phase.REFUSE, Phase.COMPARE, Phase.EXCHANGE, Phase.HIDE)


class OptimizerSteps(RunPart):
    """Listeners to the steps of all optimizers of one run."""

    def __init__(self, world: World) -> None:
        self._listeners: dict[Phase, list[Listener]] = {phase: [] for phase in Phase}
        self._inner: list[Listener] = []  # before the step, inside of the user's hooks
        # The hook of each optimizer before its step, among the optimizer's own; and the one after it.
        self._hooks: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, OrderedDict[int, Any]]] = WeakKeyDictionary()
        self._showing: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
        # Optimizers whose step may run within another of theirs, and whether the listeners to HIDE were called last.
        self._nesting: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._handles = [register_optimizer_step_pre_hook(self._begin)]
        self._ends = self._is_over = False

    def listen(self, phase: Phase, listener: Listener) -> Callable[[], None]:
        """Call a listener in a phase of each step from now on, until the returned function is called."""
        self._listeners[phase].append(listener)
        self._inner = [each for before in _INNER for each in self._listeners[before]]
        if phase in (Phase.FINISH, Phase.END) and not self._ends:
            self._ends = True
            self._handles.append(register_optimizer_step_post_hook(self._end))

        def stop() -> None:
            self._listeners[phase].remove(listener)
            self._inner = [each for before in _INNER for each in self._listeners[before]]

        return stop

    def close(self) -> None:
        """Remove the hooks."""
        self._is_over = True  # for simulated ranks, which have a copy of torch's table of hooks
        for handle in (*self._handles, *(handle for handle, _ in self._hooks.values()), *self._showing.values()):
            handle.remove()

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_over:
            return None
        handle, hooks = self._hooks.get(optimizer) or self._hooked(optimizer)
        if next(reversed(hooks)) != handle.id:
            hooks.move_to_end(handle.id)  # after hooks that the user has registered since
        if self._listeners[Phase.SHOW] and optimizer not in self._showing:
            self._show_first(optimizer)
        begins = self._listeners[Phase.BEGIN]
        return self._inside(optimizer, args, kwargs, begins) if begins and not self._is_nested(optimizer) else None

    def _hooked(self, optimizer: Optimizer) -> tuple[RemovableHandle, OrderedDict[int, Any]]:
        handle = optimizer.register_step_pre_hook(self._inside)
        if not steps_as_torch(optimizer):
            self._nesting[optimizer] = False
        self._hooks[optimizer] = handle, hooks_beside(handle)
        return self._hooks[optimizer]

    def _show_first(self, optimizer: Optimizer) -> None:
        """Register the hook that acts right after a step, before those of the user's."""
        handle = self._showing[optimizer] = optimizer.register_step_post_hook(self._show)
        hooks_beside(handle).move_to_end(handle.id, last=False)

    def _is_nested(self, optimizer: Optimizer) -> bool:
        return optimizer in self._nesting and is_within_own_step(optimizer)

    def _inside(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        listeners: list[Listener] | None = None,
    ) -> Any:
        """Call listeners before a step, and return its arguments if one of them has replaced these."""
        if listeners is None:
            listeners = self._hiding(optimizer) if self._nesting and optimizer in self._nesting else self._inner
        given = None
        for listener in listeners:
            if (replaced := listener(optimizer, args, kwargs)) is not None:
                given = args, kwargs = replaced
        return given

    def _hiding(self, optimizer: Optimizer) -> list[Listener]:
        """Return the listeners of a step that may be within another: there, what is not hidden is hidden again."""
        was_hidden, self._nesting[optimizer] = self._nesting[optimizer], True
        if not is_within_own_step(optimizer):
            return self._inner
        return [] if was_hidden else self._listeners[Phase.HIDE]

    def _show(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer in self._nesting:
            if not self._nesting[optimizer]:
                return
            self._nesting[optimizer] = False
        for listener in self._listeners[Phase.SHOW]:
            listener(optimizer, args, kwargs)

    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for phase in () if self._is_over or self._is_nested(optimizer) else (Phase.FINISH, Phase.END):
            for listener in self._listeners[phase]:
                listener(optimizer, args, kwargs)
