"""distwrap: one decorator and a handful of functions make a plain PyTorch loop a distributed one."""

import importlib
import typing

from distwrap import _started as _started
from distwrap._version import __version__ as __version__

if typing.TYPE_CHECKING:
    from distwrap.checkpoint import (
        CheckpointIO as CheckpointIO,
        load as load,
        save as save,
        wait_for_saves as wait_for_saves,
    )
    from distwrap.checkpoint.resume import resume_from as resume_from, run_state as run_state
    from distwrap.comm import consolidate as consolidate
    from distwrap.data import Preemption as Preemption, shard_loader as shard_loader
    from distwrap.data.fitting import fit_batch_size as fit_batch_size
    from distwrap.data.lockstep import lockstep as lockstep
    from distwrap.data.moving import to_device as to_device
    from distwrap.data.splitting import split as split
    from distwrap.debugging import breakpoint_on as breakpoint_on
    from distwrap.decorator import distributed as distributed
    from distwrap.environments import Placement as Placement
    from distwrap.errors import DistwrapError as DistwrapError
    from distwrap.group.collectives import (
        agree as agree,
        barrier as barrier,
        broadcast as broadcast,
        gather_object as gather_object,
        mean as mean,
        reduce as reduce,
    )
    from distwrap.group.gathering import gather as gather
    from distwrap.group.members import resumable as resumable
    from distwrap.group.printing import get_logger as get_logger, print as print
    from distwrap.group.rank_zero import (
        on_rank_zero as on_rank_zero,
        rank_zero_first as rank_zero_first,
        rank_zero_only as rank_zero_only,
    )
    from distwrap.group.setup import (
        setup_process_group as setup_process_group,
        teardown_process_group as teardown_process_group,
    )
    from distwrap.group.world import (
        device as device,
        is_rank_zero as is_rank_zero,
        local_rank as local_rank,
        local_world_size as local_world_size,
        node_rank as node_rank,
        placement as placement,
        rank as rank,
        world_size as world_size,
    )
    from distwrap.launch.other_callers import NodeSummary as NodeSummary
    from distwrap.metrics_log import log as log
    from distwrap.model import (
        assert_in_sync as assert_in_sync,
        sync_buffers as sync_buffers,
        unwrap_model as unwrap_model,
    )
    from distwrap.model.empty import init_empty as init_empty
    from distwrap.model.state_dict import (
        add_module_prefix as add_module_prefix,
        strip_module_prefix as strip_module_prefix,
    )
    from distwrap.precision import Precision as Precision, autocast as autocast
    from distwrap.progress_bar import progress as progress
    from distwrap.registry import (
        available_algorithms as available_algorithms,
        available_launchers as available_launchers,
        available_precisions as available_precisions,
        available_strategies as available_strategies,
        register_algorithm as register_algorithm,
        register_launcher as register_launcher,
        register_precision as register_precision,
        register_strategy as register_strategy,
    )
    from distwrap.seeding import rank_generator as rank_generator, seed_everything as seed_everything
    from distwrap.strategies import (
        DDPStrategy as DDPStrategy,
        FSDPStrategy as FSDPStrategy,
        Strategy as Strategy,
        local_model as local_model,
        wrap_model as wrap_model,
        wrap_optimizer as wrap_optimizer,
    )
    from distwrap.strategies.accumulation import accumulate as accumulate, no_sync as no_sync
    from distwrap.strategies.pipeline import PipelineStrategy as PipelineStrategy
    from distwrap.strategies.steps import backward as backward, optimizer_step as optimizer_step, unscale as unscale
    from distwrap.strategies.windows import Window as Window, scale_loss as scale_loss
    from distwrap.timing.report import Report as Report, report as report
    from distwrap.timing.trace import trace as trace

# The same for the interpreter, which imports a module when one of its names is first asked for.
_MODULES = {
    "checkpoint": "CheckpointIO load save wait_for_saves",
    "checkpoint.resume": "resume_from run_state",
    "model.empty": "init_empty",
    "model.state_dict": "add_module_prefix strip_module_prefix",
    "comm": "consolidate",
    "data": "Preemption shard_loader",
    "data.fitting": "fit_batch_size",
    "data.lockstep": "lockstep",
    "data.moving": "to_device",
    "data.splitting": "split",
    "debugging": "breakpoint_on",
    "decorator": "distributed",
    "environments": "Placement",
    "errors": "DistwrapError",
    "group.setup": "setup_process_group teardown_process_group",
    "group.world": "device is_rank_zero local_rank local_world_size node_rank placement rank world_size",
    "group.collectives": "agree barrier broadcast gather_object mean reduce",
    "group.gathering": "gather",
    "group.members": "resumable",
    "group.printing": "get_logger print",
    "group.rank_zero": "on_rank_zero rank_zero_first rank_zero_only",
    "launch.other_callers": "NodeSummary",
    "metrics_log": "log",
    "model": "assert_in_sync sync_buffers unwrap_model",
    "precision": "Precision autocast",
    "progress_bar": "progress",
    "registry": "available_algorithms available_launchers available_precisions available_strategies register_algorithm "
    "register_launcher register_precision register_strategy",
    "seeding": "rank_generator seed_everything",
    "strategies": "DDPStrategy FSDPStrategy Strategy local_model wrap_model wrap_optimizer",
    "strategies.accumulation": "accumulate no_sync",
    "strategies.pipeline": "PipelineStrategy",
    "strategies.steps": "backward optimizer_step unscale",
    "strategies.windows": "Window scale_loss",
    "timing.report": "Report report",
    "timing.trace": "trace",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted({*_MODULE_OF, "__version__"} - {"print"})  # `import *` must not take the builtin's place

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


if not _started.is_command_line():
    from distwrap.devices.kinds import watch_first_use as _watch_first_use

    _watch_first_use()
