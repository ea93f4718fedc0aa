"""The strategy single: one process, one device."""

import inspect
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distwrap.devices.transfer import move
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import World
from distwrap.model.distributed import LocalModel, LocalRouting
from distwrap.model.empty import drawn_seed, fill, is_empty
from distwrap.model.transparent import unwrap_model
from distwrap.strategies.base import Strategy, Wrapping
from distwrap.wording import unknown_name

_OURS = {"self", "module", "device_ids", "output_device", "dim"}
_PLACED = "Leave it out: wrap_model() puts the model on this rank's device, or on device=…."
_HINTS = {**dict.fromkeys(("device_ids", "output_device"), _PLACED), "mixed_precision": "Did you mean 'precision'?"}
_OF_WRAP_MODEL = ("strategy", "device", "precision", "sync_batchnorm", "forward_methods", "comm", "same_inputs", *_OURS)


class SingleStrategy(Strategy):
    """Strategy of one process, in which a thin wrapper takes care of precision and device."""

    launches = "one"

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        if world.placement.world_size > 1:
            raise ModelError(
                f"strategy='single' on {world.placement.world_size} ranks would train as many separate models. "
                "Use strategy='ddp', or start one process. If each rank is meant to have its own, say "
                "local_model(model)."
            )
        return local(model, wrapping)


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a model on a device, and initialise it if it has no numbers yet; every rank calls it."""
    if not is_empty(model):
        return move(model, device)
    from distwrap.strategies.parameter_swap import ParameterSwap  # imports torch's DTensor

    net = unwrap_model(model)
    before = dict(net.named_parameters(remove_duplicate=False))
    fill(net, device, drawn_seed())
    ParameterSwap(before, net)
    return model


def local(model: nn.Module, wrapping: Wrapping) -> nn.Module:
    """Wrap a model that exchanges nothing, so that it has ``model.module`` as with several ranks."""
    check_ddp_options("wrap_model()", wrapping.options)
    return LocalModel(LocalRouting(model, wrapping.in_precision, wrapping.forward_methods))


def check_ddp_options(taker: str, names: Iterable[str], others: Iterable[str] = _OF_WRAP_MODEL) -> None:
    """Refuse names that are neither options of DistributedDataParallel nor `others`, with any number of ranks.

    Raises:
        OptionError: a name is unknown; the message has the nearest known one.
    """
    known = {*inspect.signature(DistributedDataParallel.__init__).parameters} - _OURS | {*others}
    for name in names:
        if name not in known:
            raise OptionError(unknown_name(f"option of {taker}", name, known - {"self", "module"}, _HINTS))
