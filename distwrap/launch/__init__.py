"""Start the ranks: decide how, and do it. The decision reads, it starts nothing, and refuses what is wrong first."""

import inspect
import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from distwrap import retrofit
from distwrap.devices.selection import visible_devices
from distwrap.environments import Node, Placement, detect, distwrap_environment
from distwrap.errors import MainGuardError, OptionError
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
from distwrap.group.world import World, active_world, current_world, say
from distwrap.launch import base, worker
from distwrap.launch.base import Job
from distwrap.launch.task import Call, Task, resolve
from distwrap.options import Options, switched_on
from distwrap.registry import launchers, strategies
from distwrap.seeding import preserved


def start(call: Call, options: Options) -> Any:
    """Run a call as its options and the surroundings ask, and return its value, or the list of all ranks' values.

    Inside a world it runs on; under an outer launcher it joins; else it launches, if there is more than one process.
    """
    _refuse_unguarded(call)
    if options.retrofit and not retrofit.find(call.args, call.kwargs):
        raise OptionError(
            f"retrofit=True finds no model, optimizer or loader among the arguments of {call.name}, so each rank would "
            f"train alone. Pass them as arguments (also in lists, tuples and dicts): what the function takes from its "
            f"object, a closure or a global is not seen."
        )
    strategy = strategies.make(options.strategy)
    task = Task(call, replace(options, strategy=strategy, backend=strategy.backend or options.backend))
    strategy.check(task.options)
    if active_world() is not None:
        return _here(task)
    if switched_on(os.environ, "DISTWRAP_DISABLE"):
        return _in_process(task)
    if dist.is_initialized():
        return _in_users_group(task)
    found = detect(os.environ)
    again = distwrap_environment.SCRIPT in os.environ  # this process runs the script again, for rank 0's call of it
    if isinstance(found, Placement) and found.source != "single" and not again:
        return _joining(task, found)
    visible_devices()  # first: where counting starts a driver, no fork is safe any more, which launchers then know
    launcher = launchers.make("script" if again else options.launcher)
    nodes = resolve(options, found if isinstance(found, Node) else None)
    if nodes.elastic and not launcher.restarts and not again:
        launcher = launchers.make(f"elastic(start_method={launcher.start_method!r})")
    if strategy.launches == "one":
        if nodes.several:
            raise OptionError(f"strategy={options.strategy!r} is one process, but there are {nodes.max_nodes} nodes.")
        return _in_process(task)
    nprocs = launcher.count(nodes.nprocs)
    if strategy.launches == "node":
        if nodes.nprocs not in ("auto", 1):
            raise OptionError(
                f"strategy={options.strategy!r} is one process a node, but nprocs={nodes.nprocs} was given."
            )
        nprocs = 1
    if nprocs == 1 and not nodes.several and not launcher.runs_one_rank:
        return _in_process(task)
    _check_arguments(call)
    job = Job(task, nprocs, nodes)
    launcher.check(job)
    return base.launch(launcher, job)


def _refuse_unguarded(call: Call) -> None:
    """Refuse a decorated call at the top level of a script that a rank is importing."""
    if worker.importing_main:
        raise MainGuardError(
            f"the script calls {call.name} at its top level, so every rank that imports the script would launch again. "
            f"Put the call under `if __name__ == '__main__':`, or install cloudpickle "
            f"(pip install 'distwrap[notebook]'), which makes the import unnecessary."
        )


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


def _here(task: Task) -> Any:
    """Run a call in the current world."""
    value, found = worker.execute(task)
    value = retrofit.unwrapped(value, found)
    return gather_object(value) if task.options.returns == "all" else value


def _in_process(task: Task) -> Any:
    with temporary_world(single_world(task.options)), preserved() if task.options.seed is not None else nullcontext():
        return _here(task)


def _in_users_group(task: Task) -> Any:
    ambient = current_world()
    world = World(ambient.placement, ambient.device, backend=ambient.backend, options=task.options)
    with temporary_world(world):
        world.arrange()
        return _here(task)


def _joining(task: Task, placement: Placement) -> Any:
    try:
        world = join(placement, task.options)
        announce(world, placement.source)
        _say_what_is_left_to(placement, task.options)
        value = _here(task)
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
