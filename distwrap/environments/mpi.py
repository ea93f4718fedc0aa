"""Launchers that give each process four numbers: the MPI families, jsrun and Horovod. A row each.

Sources: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html; MPICH's Hydra, Intel MPI and HPE PALS as
accelerate and libfabric read them; https://mvapich.cse.ohio-state.edu/userguide; LSF's jsrun as Lightning Fabric reads
it; horovod/runner/gloo_run.py; DeepSpeed's comm.py for AzureML's MPI jobs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distwrap.environments import hosts
from distwrap.environments.base import Placement
from distwrap.environments.reading import meeting_point, quote, read_int, require
from distwrap.errors import PlacementError


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
