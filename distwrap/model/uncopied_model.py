"""Wrapper of strategies other than DDP: its buffers as training pauses, and where somebody copies it."""

from typing import Any

from distwrap.model.model_first import ModelFirst


class UncopiedModel(ModelFirst):
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
