"""Start the ranks: decide how, and do it. The decision reads, it starts nothing, and refuses what is wrong first."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch.distributed as dist

from distwrap import retrofit
from distwrap.devices.kinds import watch_first_use
from distwrap.devices.selection import choose_nprocs, visible_devices
from distwrap.environments import Node, Placement, detect
from distwrap.errors import LaunchError, OptionError
from distwrap.group import failures
from distwrap.group.collectives import gather_object
from distwrap.group.setup import (
    abandon_process_group,
    announce,
    join,
    single_world,
    teardown_process_group,
    temporary_world,
)
from distwrap.group.world import RunOptions, World, active_world, current_world, say
from distwrap.launch import elastic, fork_safety, local, script
from distwrap.launch.execute import Call, execute
from distwrap.launch.node_plan import resolve
from distwrap.options import Options, switched_on
from distwrap.registry import strategies
from distwrap.seeding import preserved

watch_first_use()


def start(call: Call, options: Options) -> Any:
    """Run a call as its options and the surroundings ask, and return its value, or the list of all ranks' values.

    Inside a world it runs on; under an outer launcher it joins; else it launches, if there is more than one process.
    """
    local.refuse_launch_while_importing(call.name)
    everybody = options.returns == "all"
    if options.retrofit and not retrofit.find(call.args, call.kwargs):
        raise OptionError(
            f"retrofit=True finds no model, optimizer or loader among the arguments of {call.name}, so each rank would "
            f"train alone. Pass them as arguments (also in lists, tuples and dicts): what the function takes from its "
            f"object, a closure or a global is not seen."
        )
    strategy = strategies.make(options.strategy)
    run = RunOptions(
        strategy=strategy,
        precision=options.precision,
        comm=options.comm,
        seed=options.seed,
        backend=strategy.backend or options.backend,
        timeout=options.timeout,
        retrofit=options.retrofit,
        log_dir=options.log_dir,
    )
    if active_world() is not None:
        return _here(call, run, everybody)
    if switched_on(os.environ, "DISTWRAP_DISABLE"):
        return _in_process(call, run, everybody)
    if dist.is_initialized():
        return _in_users_group(call, run, everybody)
    found = detect(os.environ)
    if isinstance(found, Placement) and found.source != "single" and not script.in_child():
        return _joining(call, run, found, everybody, options)
    if options.launcher == "external":
        raise LaunchError(
            "launcher='external' waits for an outer launcher, and none has started this process. Start the script "
            "with `torchrun --nproc-per-node=2 train.py`, or choose launcher='auto'."
        )
    machines = resolve(options, found if isinstance(found, Node) else None)
    if strategy.launches == "one":
        if machines.several:
            raise OptionError(
                f"strategy={options.strategy!r} is one process, but there are {machines.max_nodes} machines."
            )
        return _in_process(call, run, everybody)
    nprocs = choose_nprocs(machines.nprocs, visible_devices())
    if strategy.launches == "node":
        if machines.nprocs not in ("auto", 1):
            raise OptionError(
                f"strategy={options.strategy!r} is one process a node, but nprocs={machines.nprocs} was given."
            )
        nprocs = 1
    if nprocs == 1 and not machines.several and not machines.elastic:
        return _in_process(call, run, everybody)
    launcher = options.launcher
    _check_arguments(call)
    if machines.elastic:
        return elastic.launch(call, run, launcher, nprocs, machines, everybody=everybody)
    if script.in_child():
        return script.join_from_child(call, run, launcher, everybody=everybody)
    if launcher == "script":
        return script.launch(call, run, nprocs, everybody=everybody)
    if launcher == "auto":
        launcher = "forkserver" if fork_safety.refusal() else "fork"
    return local.launch(call, run, launcher, nprocs, everybody=everybody, machines=machines)


def _check_arguments(call: Call) -> None:
    """Refuse arguments that do not fit the function before any process starts."""
    try:
        signature = inspect.signature(call.function)
    except (TypeError, ValueError):
        return  # of some builtins nobody knows
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        options = [name for name in call.kwargs if name in Options.__dataclass_fields__]
        hint = f" Options are given with .options({options[0]}=…)(…)." if options else ""
        raise TypeError(f"{call.name}: {error}.{hint}") from None


def _here(call: Call, run: RunOptions, everybody: bool) -> Any:
    value, found = execute(call, run)
    value = retrofit.unwrapped(value, found)
    return gather_object(value) if everybody else value


def _in_process(call: Call, run: RunOptions, everybody: bool) -> Any:
    with temporary_world(single_world(run)):
        if run.seed is None:
            return _here(call, run, everybody)
        with preserved():
            return _here(call, run, everybody)


def _in_users_group(call: Call, run: RunOptions, everybody: bool) -> Any:
    ambient = current_world()
    world = World(ambient.placement, ambient.device, backend=ambient.backend, timeout=run.timeout, options=run)
    with temporary_world(world):
        world.arrange()
        return _here(call, run, everybody)


def _joining(call: Call, run: RunOptions, placement: Placement, everybody: bool, options: Options) -> Any:
    world = join(placement, run)
    announce(world, placement.source)
    _say_what_is_left_to(placement, options)
    try:
        value = _here(call, run, everybody)
    except BaseException as error:
        told = failures.explained(error)
        failures.tell(told)
        abandon_process_group()
        if told is error:
            raise
        raise told from None
    teardown_process_group()
    return value


def _say_what_is_left_to(placement: Placement, options: Options) -> None:
    """Say which options an outer launcher has decided already."""
    source, here = placement.source, placement.local_world_size
    if options.nprocs not in ("auto", here):
        say(f"nprocs={options.nprocs} is left to {source}, which has started {here} here")
    if options.max_restarts:
        say(f"max_restarts={options.max_restarts} is left to {source}: torchrun has --max-restarts, sbatch --requeue")
    if options.log_dir is not None:
        say(f"log_dir={options.log_dir!r} is left to {source}, which holds the output: torchrun has --log-dir")
