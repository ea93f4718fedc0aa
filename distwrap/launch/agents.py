"""Rendezvous of torch elastic's agents on several nodes, of whose state nothing is unpickled but what belongs there.

The agents keep their state as a pickle in a store that does not ask who connects. This is torch's own backend, with a
look at each state before torch reads it.
"""

import io
import pickle
import pickletools
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from distwrap._internals.torch import RENDEZVOUS_STATE

NAME = "distwrap"

_ALLOWED = {*RENDEZVOUS_STATE, ("datetime", "datetime"), ("datetime", "timezone"), ("datetime", "timedelta")}


class CheckedBackend(RendezvousBackend):
    """torch's rendezvous backend, which returns no state that would call anything.

    Args:
        backend: torch's own.
    """

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        if found is not None:
            _check(found[0])
        return found

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._backend.set_state(state, token)
        if found is not None:
            _check(found[0])
        return found


def register() -> None:
    """Let torch know the rendezvous of this name."""
    rendezvous_handler_registry.register(NAME, _create_handler)


def _create_handler(params: RendezvousParameters) -> RendezvousHandler:
    backend, store = create_backend(params)
    return create_handler(store, CheckedBackend(backend), params)


def _check(state: bytes) -> None:
    """Raise an error if a state names anything but the classes of which torch's consists."""
    try:
        for opcode, argument, _ in pickletools.genops(state):
            if "PUT" in opcode.name and (argument or 0) > len(state):
                raise pickle.UnpicklingError("it has fewer objects than it announces")  # pickle would make room for all
        _State(io.BytesIO(state)).load()
    except Exception as error:
        raise RendezvousStateError(
            f"what is in the agents' store is not their state, and is not read: {error}"
        ) from error


class _Fixed(type):
    """Type of classes of which a pickle fills objects, and changes nothing in themselves."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it would change the class {cls.__name__}")


class _State(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")
        found = super().find_class(module, name)
        return _Fixed(name, (found,), {}) if (module, name) in RENDEZVOUS_STATE else found  # the others are Python's
