"""Launchers that start one process for each rank: the MPI families, jsrun and Horovod, a row each, and Slurm.

Sources: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html; MPICH's Hydra, Intel MPI and HPE PALS as
accelerate and libfabric read them; https://mvapich.cse.ohio-state.edu/userguide; LSF's jsrun as Lightning Fabric reads
it; horovod/runner/gloo_run.py; DeepSpeed's comm.py for AzureML's MPI jobs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distwrap.environments import hosts
from distwrap.environments.base import Placement
from distwrap.environments.variables import meeting_point, quote, read_int, require
from distwrap.errors import PlacementError

SLURM_NAMES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_NO_STEPS = 0xFFFFFFF0  # step numbers from here on are batch and interactive shells, and Slurm's own


@dataclass(frozen=True)
class FourNumbers:
    """Names of one launcher's variables.

    Attributes:
        names: the variables of rank, world size, local rank and local world size.
        node: the variable of the node's number; ``None`` where there is none.
        job: a variable that has another value in each run; ``None`` where there is none.
        first_host: returns the host of rank 0.
        only_with: a variable without which the others are another launcher's.
    """

    source: str
    names: tuple[str, str, str, str]
    node: str | None = None
    job: str | None = None
    first_host: Callable[[Mapping[str, str]], str | None] = hosts.first_of_allocation
    only_with: str | None = None

    def detect(self, env: Mapping[str, str]) -> Placement | str:
        """Read the variables."""
        first = self.names[0]
        if first not in env:
            return f"no {first}"
        if self.only_with is not None and self.only_with not in env:
            return f"{first}={env[first]}, but no {self.only_with}"
        require(env, self.names, self.source)
        rank, size, local_rank, local_size = (read_int(env, name) for name in self.names)
        if not 1 <= local_size <= size:
            raise PlacementError(f"{quote(env, (self.names[1], self.names[3]))}: neither can be.")
        nnodes = -(-size // local_size)
        node_rank = read_int(env, self.node) if self.node is not None and self.node in env else rank // local_size
        job = f"{self.source} {env[self.job]}" if self.job is not None and self.job in env else ""
        address, port = meeting_point(env, nnodes, self.first_host(env), job, self.source)
        return Placement(
            rank, size, local_rank, local_size, min(node_rank, nnodes - 1), nnodes, address, port, self.source, job
        )


def _with_prefix(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"


LAUNCHERS = (
    # HOROVOD_GLOO_RENDEZVOUS_ADDR is Horovod's own server, on the node of horovodrun: torch's ranks cannot meet there.
    FourNumbers("horovod", _with_prefix("HOROVOD"), node="HOROVOD_CROSS_RANK", job="HOROVOD_GLOO_RENDEZVOUS_PORT"),
    # OMPI_COMM_WORLD_NODE_RANK is the rank on this node over all jobs, not the node's number.
    FourNumbers("open_mpi", _with_prefix("OMPI_COMM_WORLD"), job="PMIX_NAMESPACE"),
    FourNumbers("mvapich2", _with_prefix("MV2_COMM_WORLD")),
    FourNumbers("mpich", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), only_with="MPI_LOCALRANKID"),
    FourNumbers(
        "pals", ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"), node="PALS_NODEID", job="PALS_APID"
    ),
    FourNumbers("pals_pmi", _with_prefix("PMI"), only_with="PMI_LOCAL_RANK"),  # PALS where it is asked for PMI
    FourNumbers("jsrun", _with_prefix("JSM_NAMESPACE"), job="LSB_JOBID", first_host=hosts.first_of_lsf),
)


def check_pmix(env: Mapping[str, str]) -> None:
    """Raise an error if PMIx alone has numbered this process: it tells the size to callers of its library only."""
    if "PMIX_RANK" in env:
        raise PlacementError(
            f"PMIX_RANK={env['PMIX_RANK']} says which rank this is, but PMIx sets no variable that says how many there "
            f"are. Start the script with srun, with Open MPI's mpirun or with torchrun, or set RANK, WORLD_SIZE, "
            f"LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself."
        )


def detect_slurm(env: Mapping[str, str]) -> Placement | str:
    """Read the variables of a task of a Slurm step, started by srun.

    They are also in the shell of sbatch and salloc, where no tasks were started: a real step has a number, and more
    than one task. Source: https://slurm.schedmd.com/srun.html, "output environment variables"; read off Slurm 22.05.
    """
    if "SLURM_JOB_ID" not in env:
        return "no SLURM_JOB_ID"
    step = env.get("SLURM_STEP_ID", "")
    if not _is_step(env):
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


def forgotten_srun(env: Mapping[str, str]) -> str:
    """Return in words that srun was forgotten: this is the shell of a job of several tasks; empty where it is not.

    Example:
        >>> forgotten_srun({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"})[:47]
        'this is one process in the shell of Slurm job 7'
    """
    job, tasks = env.get("SLURM_JOB_ID"), env.get("SLURM_NTASKS", "1")
    if job is None or tasks == "1" or _is_step(env):
        return ""
    return (
        f"this is one process in the shell of Slurm job {job}, which asked for {tasks} tasks: srun starts one for each"
    )


def _is_step(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _NO_STEPS


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
