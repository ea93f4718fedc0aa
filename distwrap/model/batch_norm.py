"""BatchNorm by the statistics of all ranks on CPUs, for which torch's SyncBatchNorm is not made."""

from typing import Any, TypeVar, cast

import torch
from torch import nn

from distwrap._internals.torch_autograd import batch_norm_of_all
from distwrap.group.world import current_world

Model = TypeVar("Model", bound=nn.Module)


class CPUSyncBatchNorm:
    """BatchNorm that computes as torch's SyncBatchNorm does on an accelerator; beside one of torch's classes.

    After the run, and in ``eval()``, it is that of torch's class.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the batch, normalized by the statistics of the batches of all ranks."""
        return batch_norm_of_all(self, input, current_world().layout.group)


class CPUSyncBatchNorm1d(CPUSyncBatchNorm, nn.BatchNorm1d):
    """`CPUSyncBatchNorm` of rows, or of sequences."""


class CPUSyncBatchNorm2d(CPUSyncBatchNorm, nn.BatchNorm2d):
    """`CPUSyncBatchNorm` of images."""


class CPUSyncBatchNorm3d(CPUSyncBatchNorm, nn.BatchNorm3d):
    """`CPUSyncBatchNorm` of volumes."""


_KINDS: tuple[tuple[type[nn.Module], Any], ...] = (
    (nn.BatchNorm1d, CPUSyncBatchNorm1d),
    (nn.BatchNorm2d, CPUSyncBatchNorm2d),
    (nn.BatchNorm3d, CPUSyncBatchNorm3d),
)


def sync_batch_norm(model: Model, device: torch.device) -> Model:
    """Return a model whose BatchNorm layers take their statistics from the batches of all ranks."""
    if device.type != "cpu":
        return cast("Model", nn.SyncBatchNorm.convert_sync_batchnorm(model))  # type: ignore[no-untyped-call]
    made: dict[nn.Module, nn.Module] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        kind = next((ours for torchs, ours in _KINDS if isinstance(module, torchs)), None)
        if kind is None:
            continue
        made[module] = made.get(module) or _of_all(module, kind)
        if not path:
            return cast("Model", made[module])
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent).add_module(name, made[module])
    return model


def _of_all(module: Any, kind: Any) -> nn.Module:
    made: nn.Module = kind(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        setattr(made, name, tensor)
    return made.train(module.training)
