"""distwrap: one decorator and a handful of functions make a plain PyTorch loop a distributed one."""

import importlib
import typing

from distwrap import _started as _started
from distwrap._version import __version__
from distwrap.devices.kinds import watch_first_use as _watch_first_use

if typing.TYPE_CHECKING:
    from distwrap.checkpoint import CheckpointIO, load, save, wait_for_saves
    from distwrap.checkpoint.resume import resume_from
    from distwrap.checkpoint.run_state import run_state
    from distwrap.comm import consolidate
    from distwrap.data import Preemption, shard_loader
    from distwrap.data.lockstep import lockstep
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
    from distwrap.model.state_dict import add_module_prefix, strip_module_prefix
    from distwrap.precision import Precision, autocast
    from distwrap.progress_bar import progress
    from distwrap.registry import (
        available_algorithms,
        available_launchers,
        available_precisions,
        available_strategies,
        register_algorithm,
        register_launcher,
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
    "available_launchers",
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
    "register_launcher",
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

# The same as above for the interpreter, which imports a module when one of its names is first asked for.
_MODULES = {
    "checkpoint": "CheckpointIO load save wait_for_saves",
    "checkpoint.resume": "resume_from",
    "checkpoint.run_state": "run_state",
    "model.state_dict": "add_module_prefix strip_module_prefix",
    "comm": "consolidate",
    "data": "Preemption shard_loader",
    "data.lockstep": "lockstep",
    "debugging": "breakpoint_on",
    "decorator": "distributed",
    "environments": "Placement",
    "errors": "DistwrapError",
    "group": "device is_rank_zero local_rank local_world_size node_rank placement rank setup_process_group "
    "teardown_process_group world_size",
    "group.collectives": "agree barrier broadcast gather gather_object mean reduce",
    "group.rank_zero": "on_rank_zero rank_zero_first rank_zero_only",
    "launch.nodes": "NodeSummary",
    "model": "assert_in_sync sync_buffers unwrap_model",
    "precision": "Precision autocast",
    "progress_bar": "progress",
    "registry": "available_algorithms available_launchers available_precisions available_strategies register_algorithm "
    "register_launcher register_precision register_strategy",
    "seeding": "seed_everything",
    "strategies": "DDPStrategy Strategy wrap_model wrap_optimizer",
    "strategies.accumulation": "Window accumulate scale_loss",
    "strategies.steps": "backward optimizer_step unscale",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

if not typing.TYPE_CHECKING:  # for a checker, any name would be right then

    def __getattr__(name):
        if name in _MODULE_OF:
            value = globals()[name] = getattr(importlib.import_module(f"distwrap.{_MODULE_OF[name]}"), name)
            return value
        if not name.startswith("_"):
            try:
                return importlib.import_module(f"distwrap.{name}")  # as in `distwrap.comm.traffic(model)`
            except ModuleNotFoundError as error:
                if error.name != f"distwrap.{name}":
                    raise
        raise AttributeError(f"module 'distwrap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_watch_first_use()
