"""Guard of code that only some ranks run: a collective in it raises at once, where it would otherwise wait forever."""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed import ProcessGroup

from distwrap._internals.torch import size_of_group, watch_operators
from distwrap.errors import CollectiveInRankZeroError
from distwrap.group.world import RunPart, World, current_world

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NO_COLLECTIVES = ("send", "recv", "wait_tensor")  # between two ranks, or for one that was begun before


class CollectiveGuard(RunPart):
    """Guard of one run against collectives to which the other ranks do not come.

    Attributes:
        function: in which only some ranks are at this moment; empty where all are.
        models: whose forward with gradients is a collective.
    """

    def __init__(self, world: World) -> None:
        self.function = ""
        self.models: WeakSet[torch.nn.Module] = WeakSet()


@contextmanager
def guard_collectives(name: str) -> Iterator[None]:
    """Refuse collectives for the time of a ``with``: ours, a wrapped model's forward, and torch's own.

    The cost is in the body alone: a dispatch mode looks at each operator there, and wrapped models get another forward
    for that time.

    Args:
        name: of the function whose body it is, for the error.
    """
    world = current_world()
    guard = world.part(CollectiveGuard)
    if world.placement.world_size == 1 or guard.function:
        yield
        return
    with ExitStack() as stack:
        guard.function = name
        stack.callback(setattr, guard, "function", "")
        for model in list(guard.models):
            _guard_forward(model, stack)
        stack.enter_context(watch_operators(_check_operator))
        yield


def check_collectives_allowed(what: str) -> None:
    """Refuse a collective where only some ranks are.

    Raises:
        CollectiveInRankZeroError: they are.
    """
    world = current_world()
    function = world.part(CollectiveGuard).function
    if function:
        raise CollectiveInRankZeroError(
            f"rank {world.placement.rank} called {what} inside {function}, which the other ranks do not run: "
            "they would never make this call, and all would wait. Make the call outside, on every rank, and "
            "leave only the work of one rank inside."
        )


def _guard_forward(model: torch.nn.Module, stack: ExitStack) -> None:
    name = "begin" if hasattr(type(model), "begin") else "forward"  # ours begins each method's forward
    plain, users = getattr(model, name), getattr(model, "module", model)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and model.training:
            check_collectives_allowed(f"the forward of the wrapped {type(users).__name__} with gradients on")
        return plain(*args, **kwargs)

    def restore() -> None:
        if own.get(name) is forward:  # else the model was released meanwhile
            del own[name]
            own.update(before)

    own, before = vars(model), {name: plain} if name in vars(model) else {}  # in its precision, on its device
    own[name] = forward
    stack.callback(restore)


def _check_operator(operator: Any, args: tuple[Any, ...]) -> None:
    """Refuse the operator where it is a collective; those of torch.distributed are in the namespace c10d."""
    if getattr(operator, "namespace", "") in _NAMESPACES:
        name = operator.__name__.split(".")[0].strip("_")
        if not name.startswith(_NO_COLLECTIVES) and _with_others(args):
            check_collectives_allowed(f"torch.distributed's {name}()")


def _with_others(args: tuple[Any, ...]) -> bool:
    """Return whether the operator's group has more than this one rank."""
    for arg in args:
        with contextlib.suppress(RuntimeError, TypeError, AttributeError):  # another argument than the group
            if isinstance(arg, torch.ScriptObject):
                return int(ProcessGroup.unbox(arg).size()) > 1
            if isinstance(arg, str):
                return size_of_group(arg) != 1
    return True
