"""BatchNorm by the statistics of all ranks on CPUs, for which torch's SyncBatchNorm is not made."""

from typing import TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distwrap._internals.torch_autograd import batch_norm_of_all
from distwrap.group.world import current_world

Model = TypeVar("Model", bound=nn.Module)


class CPUSyncBatchNorm(_BatchNorm):
    """BatchNorm of any number of dimensions that computes as torch's SyncBatchNorm does on an accelerator.

    After the run, and in ``eval()``, it is a plain BatchNorm.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm takes at least 2 dimensions, the first of them the batch, not {input.dim()}.")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the batch, normalized by the statistics of the batches of all ranks."""
        return batch_norm_of_all(self, input, current_world().layout.group)


def sync_batch_norm(model: Model, device: torch.device) -> Model:
    """Return a model whose BatchNorm layers take their statistics from the batches of all ranks."""
    if device.type != "cpu":
        return cast("Model", nn.SyncBatchNorm.convert_sync_batchnorm(model))  # type: ignore[no-untyped-call]
    made: dict[nn.Module, nn.Module] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, _BatchNorm):
            continue
        made[module] = made.get(module) or _of_all(module)
        if not path:
            return cast("Model", made[module])
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent).add_module(name, made[module])
    return model


def _of_all(module: _BatchNorm) -> CPUSyncBatchNorm:
    options = module.eps, module.momentum, module.affine, module.track_running_stats
    made = CPUSyncBatchNorm(module.num_features, *options)
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        setattr(made, name, tensor)
    return made.train(module.training)
