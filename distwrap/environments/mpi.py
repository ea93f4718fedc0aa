"""Launchers that tell each process four numbers: the MPI families, jsrun and Horovod. A row each.

Sources: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html; MPICH's Hydra, Intel MPI and HPE PALS as
accelerate and libfabric read them; https://mvapich.cse.ohio-state.edu/userguide; LSF's jsrun as Lightning Fabric reads
it; horovod/runner/gloo_run.py; DeepSpeed's comm.py for AzureML's MPI jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distwrap.environments import hosts
from distwrap.environments.base import Placement
from distwrap.environments.reading import meeting_point, quoted, require, whole
from distwrap.errors import PlacementError


@dataclass(frozen=True)
class Launcher:
    """The names of one launcher's variables.

    Attributes:
        node: which machine this is; ``None`` where no variable says so.
        job: what tells one run from another; ``None`` where no variable does.
        first_host: finds the machine of rank 0.
        only_with: a variable without which the others are somebody else's.
    """

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str | None = None
    job: str | None = None
    first_host: Callable[[Mapping[str, str]], str | None] = hosts.of_allocation
    only_with: str | None = None

    @property
    def names(self) -> tuple[str, str, str, str]:
        """Its four variables."""
        return self.rank, self.size, self.local_rank, self.local_size

    def detect(self, env: Mapping[str, str]) -> Placement | str:
        """Read them."""
        if self.rank not in env:
            return f"no {self.rank}"
        if self.only_with is not None and self.only_with not in env:
            return f"{self.rank}={env[self.rank]}, but no {self.only_with}"
        require(env, self.names, self.source)
        rank, size, local_rank, local_size = (whole(env, name) for name in self.names)
        if not 1 <= local_size <= size:
            raise PlacementError(f"{quoted(env, (self.size, self.local_size))}: neither can be.")
        nnodes = -(-size // local_size)
        node_rank = whole(env, self.node) if self.node is not None and self.node in env else rank // local_size
        job = f"{self.source} {env[self.job]}" if self.job is not None and self.job in env else ""
        address, port = meeting_point(env, nnodes, self.first_host(env), job, self.source)
        return Placement(
            rank, size, local_rank, local_size, min(node_rank, nnodes - 1), nnodes, address, port, self.source, job
        )


# OMPI_COMM_WORLD_NODE_RANK is the rank on this machine over all jobs, not the machine's number.
OPEN_MPI = Launcher(
    "open_mpi",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    job="PMIX_NAMESPACE",
)
MVAPICH2 = Launcher(
    "mvapich2",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
MPICH = Launcher("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", only_with="MPI_LOCALRANKID")
PALS = Launcher(
    "pals",
    "PALS_RANKID",
    "PMI_SIZE",
    "PALS_LOCAL_RANKID",
    "PALS_LOCAL_SIZE",
    node="PALS_NODEID",
    job="PALS_APID",
)
# The same, where PALS is asked for PMI.
PALS_PMI = Launcher("pals_pmi", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", only_with="PMI_LOCAL_RANK")
JSRUN = Launcher(
    "jsrun",
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_SIZE",
    job="LSB_JOBID",
    first_host=hosts.of_lsf,
)
# HOROVOD_GLOO_RENDEZVOUS_ADDR is Horovod's own server, on the machine of horovodrun: no meeting place for torch.
HOROVOD = Launcher(
    "horovod",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    node="HOROVOD_CROSS_RANK",
    job="HOROVOD_GLOO_RENDEZVOUS_PORT",
)

LAUNCHERS = (HOROVOD, OPEN_MPI, MVAPICH2, MPICH, PALS, PALS_PMI, JSRUN)


def pmix(env: Mapping[str, str]) -> Placement | str:
    """Refuse a process that PMIx alone has numbered: it tells the size to callers of its library only."""
    if "PMIX_RANK" not in env:
        return "no PMIX_RANK"
    raise PlacementError(
        f"PMIX_RANK={env['PMIX_RANK']} says which rank this is, but PMIx sets no variable that says how many there "
        f"are. Start the script with srun, with Open MPI's mpirun or with torchrun, or set RANK, WORLD_SIZE, "
        f"LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself."
    )
