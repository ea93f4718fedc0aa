"""Work of a thread beside the program's: in a stream of its own, where the device has streams.

In the program's own stream it would wait for whatever that waits for, as a collective to which other ranks have not
come yet; and the program would wait for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from distwrap.devices.kinds import kind_of


class Given(NamedTuple):
    """A tensor, and when it is ready."""

    tensor: torch.Tensor
    moment: Any


class SideStream:
    """A stream of a device; on the CPU, and where a device has no streams, nothing.

    Args:
        device: on which the stream is.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = kind_of(device).streams()
        self._stream: Any = None if self._module is None else self._module.Stream(device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Give what this thread does within a ``with`` to this stream."""
        if self._module is None:
            yield
            return
        with self._module.stream(self._stream):
            yield

    def moment(self) -> Any:
        """Return what `wait` waits for: all that the current stream of this thread was given until now."""
        if self._module is None:
            return None
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def wait(self, moment: Any) -> None:
        """Let the current stream of this thread wait for a moment of another."""
        if self._module is not None and moment is not None:
            self._module.current_stream(self._device).wait_event(moment)

    def reached(self, moment: Any) -> bool:
        """Return whether the device has come to a moment."""
        return moment is None or bool(moment.query())

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that another stream has made until the current one has used it."""
        if self._module is not None:
            tensor.record_stream(self._module.current_stream(self._device))

    def given(self, tensor: torch.Tensor) -> Given:
        """Return a tensor of the current stream for one who is in another."""
        return Given(tensor, self.moment())

    def taken(self, given: Given) -> torch.Tensor:
        """Return a tensor that another stream has given, for the current one."""
        self.wait(given.moment)
        self.uses(given.tensor)
        return given.tensor
