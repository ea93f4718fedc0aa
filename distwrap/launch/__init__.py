"""Decide how to start the ranks, and start them. Wrong options are refused before any process starts."""

import inspect
import os
from contextlib import closing, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from distwrap import retrofit
from distwrap.checks import AT_LEAST_ONE
from distwrap.devices.selection import check_backend, visible_devices
from distwrap.environments import Node, Placement, detect, distwrap_environment
from distwrap.environments.ranks import forgotten_srun
from distwrap.errors import MainGuardError, OptionError
from distwrap.group import failures, setup
from distwrap.group.collectives import gather_object
from distwrap.group.world import World, active_world, current_world, say
from distwrap.launch import base, worker
from distwrap.launch.logs import Logs, redirected
from distwrap.launch.task import Task, resolve
from distwrap.name_table import Registry
from distwrap.options import Options, switched_on
from distwrap.registry import launchers, precisions, strategies
from distwrap.seeding import preserved
from distwrap.timing import output_file


def start(task: Task) -> Any:
    """Run a task as its options and the environment ask; return its value, or a list of all ranks' values.

    Inside of a run the task just runs. Under an outer launcher this process joins the ranks. Otherwise it launches
    them, if there is more than one process.
    """
    _refuse_unguarded(task)
    options = task.options
    if options.retrofit and not retrofit.find(task.function, task.args, task.kwargs):
        raise OptionError(
            f"retrofit=True finds no model, optimizer or loader among the arguments of {task.name}, so each rank would "
            f"train alone. Pass them as arguments (also in lists, tuples, dicts and attributes): what the function "
            f"takes from a closure or a global is not seen."
        )
    strategy = strategies.make(options.strategy)
    task = replace(task, options=replace(options, strategy=strategy, backend=strategy.backend or options.backend))
    strategy.check(task.options)
    check_backend(task.options.backend)
    run = active_world()
    if run is not None:
        _check_fits(task, run)
        return _here(_with_seed_of(run, task))
    if switched_on(os.environ, "DISTWRAP_DISABLE"):
        return _in_process(_with_place_of_report(task, 0))
    if dist.is_initialized():
        return _in_users_group(_with_place_of_report(task, dist.get_rank()))
    found = detect(os.environ)
    task = _with_place_of_report(task, found.rank if isinstance(found, Placement) else options.node_rank or 0)
    again = distwrap_environment.SCRIPT in os.environ  # this process runs the script again, for rank 0's call of it
    if isinstance(found, Placement) and found.source != "single" and not again:
        return _joining(task, found)
    visible_devices()  # first: where counting starts a driver, no fork is safe any more, which launchers then know
    launcher = copy(launchers.make("script" if again else options.launcher))  # which keeps what is of one call
    nodes = resolve(options, found if isinstance(found, Node) else None, launcher)
    if nodes.elastic and not launcher.restarts and not again:
        from distwrap.launch.elastic import ElasticLauncher  # with torch's, which most calls do not need

        launcher = ElasticLauncher(launcher.start_method)
    if strategy.launches == "one":
        if nodes.several:
            raise OptionError(
                f"strategy={options.strategy!r} runs in one process, but there are {nodes.max_nodes} nodes."
            )
        return _in_process(task)
    asked = nodes.nprocs
    nprocs = asked if options.share_devices and asked != "auto" else launcher.count(asked)
    nprocs = AT_LEAST_ONE(f"launcher={options.launcher!r}: count()", nprocs)
    if strategy.launches == "node":
        if nodes.nprocs not in ("auto", 1):
            raise OptionError(
                f"strategy={options.strategy!r} runs one process on each node, but nprocs={nodes.nprocs} was given."
            )
        nprocs = 1
    if nprocs == 1 and not nodes.several and not launcher.runs_one_rank:
        if words := forgotten_srun(os.environ):
            say(words)
        return _in_process(task)
    _check_arguments(task)
    if options.log_dir is not None and not launcher.writes_logs:
        raise OptionError(
            f"log_dir={options.log_dir!r}, but launcher={launcher.name or options.launcher!r} writes no such files: "
            f"leave log_dir out, or choose another launcher."
        )
    job = base.Job(task, nprocs, nodes)
    launcher.check(job)
    return base.launch(launcher, job)


def _with_seed_of(run: World, task: Task) -> Task:
    """Return a call inside of a run without a seed of its own, if a variable has set the seed of the run."""
    if "seed" in task.asked or run.options.seed is None:
        return task
    return replace(task, options=replace(task.options, seed=None))


def _with_place_of_report(task: Task, rank: int) -> Task:
    """Return a task whose report has an absolute path; check on rank 0 that the file can be written.

    Raises:
        OptionError: it cannot.
    """
    report = task.options.report
    if not isinstance(report, str):
        return task
    path = os.path.abspath(report)
    if rank == 0 and (problem := output_file.problem(path)):
        raise OptionError(f"report={report!r} {problem}")
    return replace(task, options=replace(task.options, report=path))


def _refuse_unguarded(task: Task) -> None:
    """Refuse a decorated call at the top level of a script that a rank is importing."""
    if worker.importing_main:
        raise MainGuardError(
            f"the script calls {task.name} at its top level, so every rank that imports the script would launch again. "
            f"Put the call under `if __name__ == '__main__':`, or install cloudpickle "
            f"(pip install 'distwrap[notebook]'), which makes the import unnecessary."
        )


def _check_arguments(task: Task) -> None:
    """Refuse arguments that do not fit the function before any process starts."""
    try:
        signature = inspect.signature(task.function)
    except (TypeError, ValueError):
        return  # of some builtins nobody knows
    try:
        signature.bind(*task.args, **task.kwargs)
    except TypeError as error:
        options = [name for name in task.kwargs if name in Options.__dataclass_fields__]
        hint = f" Options are given with .options({options[0]}=…)(…)." if options else ""
        raise TypeError(f"{task.name}: {error}.{hint}") from None


def _check_fits(task: Task, run: World) -> None:
    """Refuse an option of a call inside of a run that the run does not have; options of the call itself are allowed.

    Raises:
        OptionError: names the option, and what the run has.
    """
    place, asked = run.placement, task.asked - {"seed", "returns", "retrofit"}
    if place.source not in ("distwrap", "single") or switched_on(os.environ, "DISTWRAP_DISABLE"):
        asked -= {"nprocs", "nnodes", "node_rank", "rdzv_endpoint", "launcher", "max_restarts", "log_dir"}
    launched_by = os.environ.get(distwrap_environment.LAUNCHER)
    facts = {"nprocs": place.local_world_size, "nnodes": place.nnodes, "launcher": launched_by}
    facts |= {"backend": run.backend or task.options.backend}  # in a single process it means nothing
    tables: dict[str, Registry[Any]] = {"strategy": strategies, "precision": precisions}
    for name in sorted(asked):
        wanted, has = getattr(task.options, name), getattr(run.options, name)
        make = tables[name].make if name in tables else str
        if str(make(wanted)) not in ("auto", str(make(has)), str(facts.get(name))):
            raise OptionError(
                f"{task.name} asks for {name}={wanted!r} inside a run that has {name}={facts.get(name) or has!r}. A "
                f"call inside a run joins it as it is: leave {name} out there, or give it to the call, or the "
                f"setup_process_group(), that begins the run."
            )


def _here(task: Task) -> Any:
    """Run a call in the current world."""
    value, found = worker.execute(task)
    value = retrofit.unwrapped(value, found)
    return gather_object(value) if task.options.returns == "all" else value


def _whole_run(task: Task) -> Any:
    """Run a call that is a run of its own, in the world that was made for it."""
    with worker.reported(task):
        return _here(task)


def _in_process(task: Task) -> Any:
    kept = preserved() if task.options.seed is not None else nullcontext()
    logs = Logs(task.options.log_dir, [0])
    with closing(logs), redirected(logs.streams(0)), setup.temporary_world(setup.single_world(task.options)), kept:
        logs.start(keep=1)
        return _whole_run(task)


def _in_users_group(task: Task) -> Any:
    ambient = current_world()
    world = World(ambient.placement, ambient.device, backend=ambient.backend, options=task.options)
    with setup.temporary_world(world):
        _say_what_is_left_to(world.placement, task.options)
        world.arrange()
        return _whole_run(task)


def _joining(task: Task, placement: Placement) -> Any:
    try:
        world = setup.join(placement, task.options)
        setup.announce(world, placement.source)
        _say_what_is_left_to(placement, task.options)
        value = _whole_run(task)
    except BaseException as error:
        told = failures.explained(error)
        failures.tell(told)
        setup.abandon_process_group(failed=failures.is_failure(error))
        if told is error:
            raise
        raise told from None
    setup.teardown_process_group()
    return value


def _say_what_is_left_to(placement: Placement, options: Options) -> None:
    """Print which options are ignored, since an outer launcher has decided them."""
    source, here = placement.source, placement.local_world_size
    if options.nprocs not in ("auto", here):
        say(f"nprocs={options.nprocs} is left to {source}, which has started {here} here")
    if options.max_restarts:
        say(f"max_restarts={options.max_restarts} is left to {source}: torchrun has --max-restarts, sbatch --requeue")
    if options.log_dir is not None:
        say(f"log_dir={options.log_dir!r} is left to {source}, which holds the output: torchrun has --log-dir")
