"""A task of a Slurm step, started by srun.

The variables are also in the shell of sbatch and salloc, where no tasks were started: a real step has a number, and
more than one task. Source: https://slurm.schedmd.com/srun.html, "output environment variables"; read off Slurm 22.05.
"""

from collections.abc import Mapping

from distwrap.environments import hosts
from distwrap.environments.base import Placement
from distwrap.environments.reading import meeting_point, quote, read_int, require
from distwrap.errors import PlacementError

NAMES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")

_NO_STEPS = 0xFFFFFFF0  # step numbers from here on are batch and interactive shells, and Slurm's own


def detect(env: Mapping[str, str]) -> Placement | str:
    """Read a step's variables."""
    if "SLURM_JOB_ID" not in env:
        return "no SLURM_JOB_ID"
    step = env.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= _NO_STEPS:
        return f"job {env['SLURM_JOB_ID']}, but no step: a shell of sbatch or salloc (srun starts tasks)"
    # The job may have asked for more tasks than this step runs.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    if env.get(size) == "1":
        return f"step {env['SLURM_JOB_ID']}.{step} has one task"
    names = ("SLURM_PROCID", size, "SLURM_LOCALID", "SLURM_NODEID")
    require(env, names, "slurm")
    rank, world_size, local_rank, node_rank = (read_int(env, name) for name in names)
    tasks = _tasks_per_node(env, world_size)
    if node_rank >= len(tasks):
        raise PlacementError(f"SLURM_NODEID={node_rank}, but the step has tasks on {len(tasks)} node(s): {tasks}.")
    nodelist = env.get("SLURM_STEP_NODELIST") or hosts.nodelist_of_job(env)
    job = f"slurm {env['SLURM_JOB_ID']}.{step}"
    first = hosts.expand(nodelist)[0] if nodelist else None
    address, port = meeting_point(env, len(tasks), first, job, "slurm")
    return Placement(rank, world_size, local_rank, tasks[node_rank], node_rank, len(tasks), address, port, "slurm", job)


def _tasks_per_node(env: Mapping[str, str], world_size: int) -> list[int]:
    """Return each node's number of tasks; SLURM_NTASKS_PER_NODE is only there where the user asked for it."""
    name = next((n for n in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if n in env), None)
    if name is None:
        raise PlacementError("the environment is half set for slurm: there is no SLURM_STEP_TASKS_PER_NODE.")
    tasks = hosts.tasks_per_node(env[name])
    if sum(tasks) != world_size:
        raise PlacementError(
            f"{quote(env, (name, 'SLURM_STEP_NUM_TASKS', 'SLURM_NTASKS'))} contradict each other: the nodes' tasks "
            f"are {sum(tasks)} in all, not {world_size}."
        )
    return tasks
