"""A model that trains on its own most of the time, under an algorithm that exchanges weights."""

from typing import Any

from distwrap.group.world import say_once
from distwrap.model.distributed import DistributedModel


class ReplicaModel(DistributedModel):
    """A `DistributedModel` whose gradients DDP leaves alone while ``_trains_alone``, as in its ``no_sync()``.

    Prints a notice, once a run, when eval() or state_dict() sees weights that differ between ranks.
    """

    _same_weights = False

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward averages gradients, as DDP reads it."""
        own = self.__dict__
        return own.get("_syncs", True) and not own.get("_trains_alone", False)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.__dict__["_syncs"] = value

    def train(self, mode: bool = True) -> Any:
        """Set the training flag."""
        if self.training and not mode:
            self._note_own_weights("eval()")
        return super().train(mode)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's own state dict, of this rank's weights."""
        self._note_own_weights("state_dict()")
        return super().state_dict(*args, **kwargs)

    def _note_own_weights(self, where: str) -> None:
        exchange = self.__dict__.get("_exchange")
        if exchange is not None and not exchange.alike:
            say_once(
                "own weights",
                f"{where} sees this rank's own weights, and under this comm= each rank has others. For the mean of "
                f"all: with distwrap.consolidate(model): ...",
            )
