"""The matrix of the conformance suite: which strategy runs it, on how many ranks, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from distwrap import FSDPStrategy, Strategy, broadcast, unwrap_model
from distwrap.group.world import Layout, World, current_world
from distwrap.model.wrapped_models import WrappedModels
from distwrap.strategies.auto import AutoStrategy
from distwrap.strategies.base import Wrapping
from distwrap.strategies.dp import DDP2Strategy
from distwrap.strategies.pipeline import PipelineStrategy
from distwrap.testing import behaviours
from tests.plans import TP, TWO_BY_TWO
from tests.slow import MORE_RANKS
from tests.strategies.by_hand import ByHand


@dataclass(frozen=True)
class Cell:
    """One run of the suite.

    Attributes:
        name: of the cell, for the test.
        strategy: a name, or an object.
        nprocs: number of ranks.
        refuses: the behaviours that it refuses by name.
        lacks: the behaviours that are not asked of it.
        only: the behaviours that are asked of it, if not all.
        slow: why its heart is for `make test-all` alone, if it is.
        nightly: what shows all of it in `make test-all`, where it is for `make nightly` alone.
        fails: the behaviours that it does not show yet.
    """

    name: str
    strategy: str | Strategy
    nprocs: int = 2
    refuses: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    slow: str = ""
    nightly: str = ""
    fails: tuple[str, ...] = ()


class NodesOfOne(DDP2Strategy):
    """ddp2 with a node for each rank, as far as it can see."""

    def setup(self, world: World) -> Layout | None:
        rank, size = world.placement.rank, world.placement.world_size
        world.placement = replace(
            world.placement, local_rank=0, local_world_size=1, node_rank=rank, nnodes=size, source="distwrap"
        )
        return super().setup(world)


class Pair(ByHand):
    """ByHand with what its own tests do without: rank 0's weights, every step, and one process."""

    layout = Layout(0, 1)

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.copy_(broadcast(tensor.data))
        if not wrapping.in_precision.is_plain:
            model.forward = wrapping.in_precision(model.forward)  # type: ignore[method-assign]
        return super().prepare_model(model, world, wrapping)

    def backward(self, loss: torch.Tensor) -> None:
        if self.layout.group is None:
            Strategy.backward(self, loss)
        else:
            self.models = [unwrap_model(model) for model in current_world().part(WrappedModels)]  # none that is gone
            super().backward(loss)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        return Strategy.step(self, optimizer) is not False


# LBFGS needs all parameters as one vector; hooks of divided parameters see no gradient, but after it is reduced.
DIVIDED = ("lbfgs", "gradient_hooks", "deepcopy")
FP16 = ("fp16", "fp16_overflow", "fp16_clip")
# ByHand averages in `distwrap.backward` alone, and leaves buffers to each share.
ONLY_BY_HELPERS = ("plain_backward_and_step", "retrofit", "batch_norm")

# LBFGS needs all gradients as one vector; torch's clip sees those of one stage.
IN_STAGES = ("lbfgs", "torchs_own_clip")
OTHERS = "ddp, fsdp and pipeline have the behaviours of a heart in `make test`"
SCHEDULES = "the cell pipeline, whose stages run in another order"

# What `make test` asks.
HEART = frozenset(behaviours.BEHAVIOURS)

# What is asked again where another cell has been asked for everything: it depends on the number of ranks, on which of
# them are one copy of the model, on how tensors fall into parts, or on when a strategy is chosen.
AGAIN = (
    "averages_go_by_share", "objects_go_by_rank", "loaders_go_by_share", "trains_from_a_sharded_loader",
    "noise_goes_by_share", "dropout_goes_by_share", "lockstep_ends_with_the_first", "ranks_are_in_sync",
    "a_rank_that_drifted_is_noticed", "uneven_evaluation", "evaluation_on_one_share", "batch_norm", "unlike_starts",
    "adamw_in_float64", "made_before_wrapping", "two_models", "tied_weights", "frozen_parameters", "deepcopy",
    "accumulate_a_short_window", "scale_loss_over_windows", "clip_tells_the_norm", "torchs_own_clip", "fp16_overflow",
    "state_is_the_plain_one", "saved_for_one_process", "loaded_from_one_process", "resume_from_parts",
    "parts_are_whole_again", "optimizer_state_is_the_plain_one", "retrofit",
)  # fmt: skip

CELLS = (
    Cell("ddp", "ddp"),
    Cell("ddp on one rank", "ddp", 1, nightly="the cell ddp"),
    Cell("ddp on three ranks", "ddp", 3, only=AGAIN, nightly="the cell ddp"),
    Cell("ddp on four ranks", "ddp", 4, only=AGAIN, nightly="the cell ddp"),
    Cell("ddp2", NodesOfOne(), only=AGAIN, nightly="the cell ddp, its own code where a node has no accelerators"),
    Cell("zero1", "zero1", refuses=("lbfgs",), slow=OTHERS),
    Cell("zero1 on three ranks", "zero1", 3, only=AGAIN, nightly="the cell zero1"),
    Cell("fsdp", "fsdp", refuses=DIVIDED),
    Cell("fsdp on three ranks", "fsdp", 3, refuses=DIVIDED, only=AGAIN, nightly="the cell fsdp"),
    Cell("hsdp", FSDPStrategy(shard=2), 4, refuses=DIVIDED, only=AGAIN, slow=MORE_RANKS),
    Cell("tp", TP, refuses=("lbfgs", "deepcopy"), slow=OTHERS),
    Cell("fsdp+tp", TWO_BY_TWO, 4, refuses=DIVIDED, only=AGAIN, slow=MORE_RANKS),
    Cell("pipeline", "pipeline", refuses=IN_STAGES),
    Cell(
        "pipeline over microbatches",
        PipelineStrategy(loss="loss", check=True),
        2,
        (*IN_STAGES, "batch_norm"),
        only=AGAIN,
    ),
    Cell(
        "pipeline, interleaved", PipelineStrategy(schedule="interleaved"), 2, IN_STAGES, only=AGAIN, nightly=SCHEDULES
    ),
    Cell("pipeline on three ranks", "pipeline", 3, IN_STAGES, only=AGAIN, nightly="the cell pipeline"),
    Cell("two pipelines", PipelineStrategy(stages=2, schedule="gpipe"), 4, IN_STAGES, only=AGAIN, slow=MORE_RANKS),
    Cell("auto", "auto", only=tuple(HEART), slow="ddp's own code, chosen"),
    Cell(
        "auto in little memory",
        AutoStrategy(device_memory=1000),
        only=tuple(HEART),
        nightly="the cell fsdp, which is chosen",
    ),
    Cell("by hand", Pair(), refuses=FP16, slow=OTHERS),
    Cell("by hand, two pairs", Pair(), 4, FP16, lacks=ONLY_BY_HELPERS, only=AGAIN, nightly="the cell by hand"),
)
