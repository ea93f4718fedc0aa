"""Arrangement of the ranks for the data, where several ranks together hold one copy of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Layout:
    """Arrangement of the ranks for the data.

    Ranks that hold parts of one copy, as under tensor or pipeline parallelism, take the same share: they have the same
    `rank` here. Shares of loaders, their seeds, `gather`, `reduce`, `mean` and `scale_loss` go by the layout;
    `barrier`, `broadcast` and `gather_object` are of all ranks.

    Attributes:
        rank: of the share that this process takes.
        size: the number of shares.
        group: the ranks of this process's place in its copy, one of each share, in the order of the shares; ``None``
            for all ranks of the world.
        mesh: of the devices, where the strategy has made one.
    """

    rank: int
    size: int
    group: ProcessGroup | None = None
    mesh: DeviceMesh | None = None
