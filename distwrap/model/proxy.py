"""The wrappers of our own strategies: transparent ones, whose calls and methods go through a `Routing`."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from distwrap._internals.torch import ASKED_BY_DDP
from distwrap.errors import ModelError
from distwrap.group.world import current_world
from distwrap.model.forward_routing import Routing
from distwrap.model.transparent import TransparentModule, put_model_first
from distwrap.model.wrapped_models import Handle, WrappedModels


class ModelProxy(TransparentModule):
    """Wrapper whose calls go through a `Routing`; whatever is set on it is the model's, or torch's wrapper's.

    Args:
        routing: of the model.
        **parts: what the run's `Handle` of the model has beside it.
    """

    _distwrap_routing: Any  # which only the wrapper itself reads; others have `handle_of`

    def __init__(self, routing: Routing, **parts: Any) -> None:
        self._distwrap_go_through(routing, type(self))
        current_world().part(WrappedModels).handles[self] = Handle(routing, **parts)

    def _distwrap_go_through(self, routing: Routing, kind: type) -> None:
        """Let calls go through a routing from now on, and be a wrapper of another kind."""
        own = {"module": routing.module, "_distwrap_model": routing.model, "_distwrap_inner": routing.inner}
        self.__dict__.update(own, _distwrap_routing=routing)
        put_model_first(self, kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routing = self._distwrap_routing
        return (routing.dressed or routing.forward)(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, as a call does."""
        return self(*args, **kwargs)

    def _distwrap_method(self, name: str, method: MethodType) -> Callable[..., Any]:
        return self._distwrap_routing.looked_up(name, method)  # type: ignore[no-any-return]

    def _distwrap_moved(self) -> None:
        self._distwrap_routing.check_place()

    def __getattr__(self, name: str) -> Any:
        if name == ASKED_BY_DDP:
            raise ModelError(
                f"DistributedDataParallel got a {type(self._distwrap_model).__name__} that wrap_model() has wrapped, "
                "which exchanges its gradients already. Use what wrap_model() returns as it is."
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._distwrap_set(name, value)


class UncopiedModel(ModelProxy):
    """Wrapper that can be neither copied nor pickled.

    Its routing says why, by ``refuse_copy()``, and has `Buffers`, or ``None``, as ``buffers``.
    """

    def __init__(self, routing: Any, **parts: Any) -> None:
        super().__init__(routing, buffers=routing.buffers, alignment=routing.alignment, **parts)

    def train(self, mode: bool = True) -> Any:
        """Set the training flag; when training pauses, take over rank 0's buffers."""
        buffers, pauses = self._distwrap_routing.buffers, self.training and not mode
        super().train(mode)
        if pauses and buffers is not None:
            buffers.pause()
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self._distwrap_routing.refuse_copy()

    def __copy__(self) -> Any:
        return self._distwrap_routing.refuse_copy()

    def __reduce__(self) -> Any:
        return self._distwrap_routing.refuse_copy()
