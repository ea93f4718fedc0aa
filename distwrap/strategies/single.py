"""One process, one device."""

from torch import nn

from distwrap.errors import ModelError
from distwrap.group.world import World
from distwrap.model.distributed import LocalModel
from distwrap.strategies.base import Strategy, Wrapping


class SingleStrategy(Strategy):
    """The user's own model: wrapped only where precision or device ask for it."""

    launches = "one"

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        if world.placement.world_size > 1:
            raise ModelError(
                f"strategy='single' in a world of {world.placement.world_size} ranks would train as many models apart. "
                f"Use strategy='ddp', or start one process."
            )
        return local(model, wrapping)


def local(model: nn.Module, wrapping: Wrapping) -> nn.Module:
    """Wrap a model only where there is something to do at a forward."""
    if wrapping.in_precision.is_plain and wrapping.device.type == "cpu":
        return model
    return LocalModel(model, wrapping.in_precision, wrapping.forward_methods)
