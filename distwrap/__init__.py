"""distwrap: one decorator and a handful of functions make a plain PyTorch loop a distributed one."""

from distwrap._version import __version__
from distwrap.checkpoint import CheckpointIO, load, run_state, save, wait_for_saves
from distwrap.checkpoint.resume import resume_from
from distwrap.checkpoint.state_dict import add_module_prefix, strip_module_prefix
from distwrap.comm import consolidate
from distwrap.data import Preemption, lockstep, shard_loader
from distwrap.debugging import breakpoint_on
from distwrap.decorator import distributed
from distwrap.environments import Placement
from distwrap.errors import DistwrapError
from distwrap.group import (
    device,
    is_rank_zero,
    local_rank,
    local_world_size,
    node_rank,
    placement,
    rank,
    setup_process_group,
    teardown_process_group,
    world_size,
)
from distwrap.group.collectives import agree, barrier, broadcast, gather, gather_object, mean, reduce
from distwrap.group.rank_zero import on_rank_zero, rank_zero_first, rank_zero_only
from distwrap.launch.nodes import NodeSummary
from distwrap.model import assert_in_sync, sync_buffers, unwrap_model
from distwrap.precision import Precision, autocast
from distwrap.progress_bar import progress
from distwrap.registry import (
    available_algorithms,
    available_precisions,
    available_strategies,
    register_algorithm,
    register_precision,
    register_strategy,
)
from distwrap.seeding import seed_everything
from distwrap.strategies import DDPStrategy, Strategy, wrap_model, wrap_optimizer
from distwrap.strategies.accumulation import Window, accumulate, scale_loss
from distwrap.strategies.steps import backward, optimizer_step, unscale

__all__ = [
    "CheckpointIO",
    "DDPStrategy",
    "DistwrapError",
    "NodeSummary",
    "Placement",
    "Precision",
    "Preemption",
    "Strategy",
    "Window",
    "__version__",
    "accumulate",
    "add_module_prefix",
    "agree",
    "assert_in_sync",
    "autocast",
    "available_algorithms",
    "available_precisions",
    "available_strategies",
    "backward",
    "barrier",
    "breakpoint_on",
    "broadcast",
    "consolidate",
    "device",
    "distributed",
    "gather",
    "gather_object",
    "is_rank_zero",
    "load",
    "local_rank",
    "local_world_size",
    "lockstep",
    "mean",
    "node_rank",
    "on_rank_zero",
    "optimizer_step",
    "placement",
    "progress",
    "rank",
    "rank_zero_first",
    "rank_zero_only",
    "reduce",
    "register_algorithm",
    "register_precision",
    "register_strategy",
    "resume_from",
    "run_state",
    "save",
    "scale_loss",
    "seed_everything",
    "setup_process_group",
    "shard_loader",
    "strip_module_prefix",
    "sync_buffers",
    "teardown_process_group",
    "unscale",
    "unwrap_model",
    "wait_for_saves",
    "world_size",
    "wrap_model",
    "wrap_optimizer",
]
