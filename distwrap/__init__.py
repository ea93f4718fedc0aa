"""distwrap: one decorator and a handful of functions make a plain PyTorch loop a distributed one.

Each name has a help of its own, as in ``help(distwrap.wrap_model)``:

    CheckpointIO: Format of a checkpoint; a class of your own needs these two methods and this attribute.
    DDPStrategy: Strategy in which each process has the same model, and the gradients are averaged during the backward.
    DistwrapError: Base class of all errors that distwrap raises.
    FSDPStrategy: Strategy in which each rank holds a share of a model, and gathers one unit at a time while that
        computes.
    NodeSummary: Result of a decorated call on every node but the one of rank 0.
    PipelineStrategy: Strategy in which a model's blocks run in stages, one after the other on the ranks, over
        microbatches.
    Placement: Place of this process in its world. All values come from one source.
    Precision: Full precision, ``"32"``; subclass it, and override what differs in another precision.
    Preemption: Announcement by the cluster that it will take the node away.
    Report: Report of where the time of a run goes; empty until the ``with`` has ended, and then the same on every
        rank.
    Strategy: Way to replicate or divide a model; subclass it, or a strategy of distwrap, and override what should
        differ.
    Window: Micro-batches of one optimizer step, as `accumulate` yields it with each of them.
    accumulate: Iterate over micro-batches in windows of `steps`, after each of which the optimizer steps.
    add_module_prefix: Put ``module.`` in front of every key, which a bare DistributedDataParallel or DataParallel
        needs to load it.
    agree: Return whether any rank, or every rank, has a true flag, so that all ranks take the same branch.
    assert_in_sync: Check that all ranks hold the same weights and buffers, bit by bit; a collective, and a no-op in
        one process.
    autocast: Compute in the precision of this run within a ``with``, for code outside of a wrapped model's forward.
    available_algorithms: Return the names of the algorithms for ``comm=``, each with its description.
    available_launchers: Return the launchers' names, each with its description: ours, registered ones, and those of
        installed packages.
    available_precisions: Return the names of the precisions, each with its description.
    available_strategies: Return the strategies' names, each with its description: ours, registered ones, and those of
        installed packages.
    backward: Compute the gradients of a loss, as ``loss.backward()`` does; under fp16 the loss is scaled first.
    barrier: Wait until every rank has called this; return at once in a single process.
    breakpoint_on: Stop here, and give the terminal to the debugger (pdb) of one rank, while the others wait without a
        timeout.
    broadcast: Return the value of rank `src` on every rank; the values that other ranks pass are ignored.
    consolidate: Give every rank the mean of all ranks' weights and buffers, to evaluate, save or return them; a
        collective.
    device: Return the device of this rank.
    distributed: Turn a plain function with a training loop into one that runs on several processes.
    fit_batch_size: Call a function with a batch size, which is halved on all ranks together until no rank runs out of
        memory.
    gather: Concatenate the tensors of all ranks along the first dimension, in rank order, on every rank.
    gather_object: Return every rank's value as a list in rank order, on every rank.
    gathered_weights: Let a divided model, or a module of it, have whole weights and gradients within a ``with``; every
        rank enters it.
    get_logger: Return a logger that writes the rank in front of each message; in a single process messages stay as
        they are.
    init_empty: Make models without numbers within a ``with``: they take no memory, so they may exceed what one process
        holds.
    is_rank_zero: Return whether this is rank 0, as it is in a single process.
    load: Read a checkpoint with torch's safe loader, by default onto the CPU, so that the ranks do not crowd one
        device.
    local_model: Prepare a model that each rank trains for itself: its gradients are not averaged, nor its weights
        compared.
    local_rank: Return this process's rank among those on its node.
    local_world_size: Return the number of processes on this node.
    lockstep: Iterate over a loader so that all ranks take the same steps; the same rules hold in a single process.
    log: Log metrics on rank 0; on the other ranks do nothing, without waiting.
    mean: Return the mean over all ranks, in which each rank's value counts for as many items as it stands for.
    no_sync: Leave gradients on their rank within a ``with``, for loops that accumulate by ``if step % k``.
    node_rank: Return which node this is, 0 where there is only one.
    on_rank_zero: Make an object on rank 0, and on the other ranks a stand-in that accepts any call or attribute and
        does nothing.
    optimizer_step: Clip the gradients and step the optimizer; under fp16 unscale before, skip on overflow, and update
        the scale.
    placement: Return where this process stands: right before, during and after the group's life.
    print: Print on rank 0 only, as the builtin ``print`` does; in a single process it is the builtin.
    progress: Show the progress of rank 0, with tqdm if it is installed, else by lines of text; other ranks are quiet.
    rank: Return this process's rank, 0 in a single process.
    rank_generator: Return a generator whose numbers differ between ranks, for random numbers that the loop draws
        itself.
    rank_zero_first: Let rank 0 run the block first, and the others when it has finished, as to download or preprocess
        data once.
    rank_zero_only: Run a function or method on rank 0 only; on the other ranks it returns `default`.
    reduce: Combine the values of all ranks element by element, and return the result on every rank.
    register_algorithm: Make an algorithm of exchange known by a name, for ``comm=name``.
    register_launcher: Make a launcher known by a name, for ``@distributed(launcher=name)``.
    register_precision: Make a precision known by a name, for ``@distributed(precision=name)`` and
        ``wrap_model(precision=name)``.
    register_strategy: Make a strategy known by a name, for ``@distributed(strategy=name)`` and
        ``wrap_model(strategy=name)``.
    report: Measure where the time goes within a ``with``, on all ranks; every rank must enter and leave it.
    resume_from: Load the checkpoint that `save` wrote last to a path; return ``None`` on every rank if there is none
        yet.
    run_state: Return an object with the state of the run: all random numbers, the seed, and the gradient scaler of
        fp16.
    save: Together on all ranks, write a checkpoint, completely or not at all.
    scale_loss: Turn a sum over tokens or samples into the loss whose gradient is that of the mean over those of all
        ranks.
    seed_everything: Seed torch (all devices), `random` and numpy with the same seed on every rank, and remember it for
        the loaders.
    setup_process_group: Join the other processes: find out who started them, meet them, and choose the device.
    shard_loader: Return the same loader for this rank's share of the data; in a single process on the CPU, the loader
        itself.
    split: Return this rank's part of a list, as one slice; in a single process, the list itself.
    strip_module_prefix: Remove ``module.``, ``_orig_mod.`` and FSDP's prefix from the keys of a state dict, in any
        nesting.
    sync_buffers: Give every rank the same buffers, such as BatchNorm's running statistics; a collective.
    teardown_process_group: Leave the process group that `setup_process_group` or the decorator made; without one, do
        nothing.
    to_device: Return a batch on this rank's device; on the CPU, the batch itself.
    trace: Trace some steps of the loop within a ``with``, on all ranks, each into a file of its own.
    unscale: Undo the scaling of an optimizer's gradients under fp16, to read or change them before `optimizer_step`.
    unwrap_model: Return the user's model out of any nesting of distwrap, DDP, DataParallel and torch.compile.
    wait_for_saves: Together on all ranks, wait until everything that ``save(background=True)`` writes is on disk.
    where: Print on standard error the line in which each rank is: in a debugger, or anywhere in the loop.
    world_size: Return the number of processes, 1 in a single process.
    wrap_model: Prepare a model for distributed training; in a single process on the CPU in float32 it only gets a thin
        wrapper.
    wrap_optimizer: Prepare an optimizer: return it as it is, unless the model's ``comm=`` works through it, as
        ``"qadam"`` does.
"""

import importlib
import typing

from distwrap import _started as _started
from distwrap._version import __version__ as __version__
from distwrap.frames import hide_from_pytest as _hide_from_pytest

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
    from distwrap.debugging import breakpoint_on as breakpoint_on, where as where
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
    from distwrap.launch.peer_launchers import NodeSummary as NodeSummary
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
    from distwrap.strategies.divided_tensors import gathered_weights as gathered_weights
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
    "debugging": "breakpoint_on where",
    "decorator": "distributed",
    "environments": "Placement",
    "errors": "DistwrapError",
    "group.setup": "setup_process_group teardown_process_group",
    "group.world": "device is_rank_zero local_rank local_world_size node_rank placement rank world_size",
    "group.collectives": "agree barrier broadcast gather_object mean reduce",
    "group.gathering": "gather",
    "group.printing": "get_logger print",
    "group.rank_zero": "on_rank_zero rank_zero_first rank_zero_only",
    "launch.peer_launchers": "NodeSummary",
    "metrics_log": "log",
    "model": "assert_in_sync sync_buffers unwrap_model",
    "precision": "Precision autocast",
    "progress_bar": "progress",
    "registry": "available_algorithms available_launchers available_precisions available_strategies register_algorithm "
    "register_launcher register_precision register_strategy",
    "seeding": "rank_generator seed_everything",
    "strategies": "DDPStrategy FSDPStrategy Strategy local_model wrap_model wrap_optimizer",
    "strategies.accumulation": "accumulate no_sync",
    "strategies.divided_tensors": "gathered_weights",
    "strategies.pipeline": "PipelineStrategy",
    "strategies.steps": "backward optimizer_step unscale",
    "strategies.windows": "Window scale_loss",
    "timing.report": "Report report",
    "timing.trace": "trace",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
_PUBLIC = sorted(_MODULE_OF)
__all__ = sorted({*_PUBLIC, "__version__"} - {"print"})  # `import *` must not take the builtin's place

if not typing.TYPE_CHECKING:  # for a checker, any name would be right then

    def __getattr__(name):
        if name in _MODULE_OF:
            value = globals()[name] = getattr(importlib.import_module(f"distwrap.{_MODULE_OF[name]}"), name)
            _hide_from_pytest()
            return value
        if not name.startswith("_"):
            try:
                return importlib.import_module(f"distwrap.{name}")  # as in `distwrap.comm.traffic(model)`
            except ModuleNotFoundError as error:
                if error.name != f"distwrap.{name}":
                    raise
            _refuse_removed(name)
        raise AttributeError(f"module 'distwrap' has no attribute {name!r}")


def _refuse_removed(name: str) -> None:
    """Raise an error for a function that is not here any more, with what to write instead."""
    from distwrap.errors import RemovedError
    from distwrap.former_names import REMOVED

    if name in REMOVED["function"]:
        raise RemovedError(f"distwrap.{name} is not here: {REMOVED['function'][name]}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF} - {"importlib", "typing"})


if not _started.is_command_line():
    from distwrap.devices.kinds import watch_first_use as _watch_first_use

    _watch_first_use()
