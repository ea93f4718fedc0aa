"""Who am I: one detector a launcher, asked in a fixed order.

The order: what distwrap itself started; torch's complete set; Horovod, Open MPI, MVAPICH2, MPICH, PALS, jsrun; a Slurm
step, last of these, since mpirun and torchrun inherit the variables of the job around them; other packages' detectors;
then what knows the machine alone. All values come from the first that knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from distwrap.errors import PlacementError
from distwrap.placement import machines, mpi, own, slurm, torchrun
from distwrap.placement.base import Detector, Machine, Placement

__all__ = ["DETECTORS", "MACHINES", "Detector", "Machine", "Placement", "detect", "explain", "others"]

ENTRY_POINTS = "distwrap.detectors"

DETECTORS: dict[str, Detector] = {
    "distwrap": own.detect,
    "torchrun": torchrun.detect,
    **{launcher.source: launcher.detect for launcher in mpi.LAUNCHERS},
    "slurm": slurm.detect,
}
MACHINES: dict[str, Detector] = {
    "kubeflow": machines.kubeflow,
    "pai_dlc": machines.pai_dlc,
    "node_rank": machines.by_hand,
    "sagemaker": machines.sagemaker,
}

# What else says the same thing as RANK, WORLD_SIZE and LOCAL_RANK, and must not say another.
_NAMES: dict[str, tuple[str, str, str]] = {
    **{launcher.source: launcher.names[:3] for launcher in mpi.LAUNCHERS},
    "slurm": slurm.NAMES,
}


def detect(env: Mapping[str, str]) -> Placement | Machine:
    """Ask every detector in order; the first that knows decides, and a single process is the answer else.

    Raises:
        PlacementError: a launcher's variables are incomplete, or contradict themselves or another launcher's.

    Example:
        >>> detect({}).source
        'single'
    """
    for name, detector in DETECTORS.items():
        found = detector(env)
        if isinstance(found, Placement):
            _check(env, found, name)
            return found
    for detector in others().values():
        found = detector(env)
        if not isinstance(found, str):
            return found
    for detector in MACHINES.values():
        found = detector(env)
        if isinstance(found, Machine):
            return found
    torchrun.refuse_half_set(env)
    mpi.pmix(env)
    return Placement()


def explain(env: Mapping[str, str]) -> dict[str, str]:
    """Say of every detector what it makes of the environment, in words.

    Example:
        >>> explain({})["slurm"]
        'no SLURM_JOB_ID'
    """
    said = {}
    for name, detector in {**DETECTORS, **others(), **MACHINES}.items():
        try:
            found = detector(env)
        except PlacementError as error:
            said[name] = f"refused: {error}"
            continue
        said[name] = found if isinstance(found, str) else f"yes: {_words(found)}"
    return said


def _words(found: Placement | Machine) -> str:
    if isinstance(found, Machine):
        return f"machine {found.node_rank} of {found.nnodes}, which starts its ranks itself"
    return f"rank {found.rank} of {found.world_size}, machine {found.node_rank} of {found.nnodes}"


def _check(env: Mapping[str, str], found: Placement, name: str) -> None:
    """Let two launchers that both started this very process not contradict each other."""
    if name == "distwrap":
        return
    if name != "torchrun":
        torchrun.refuse_contradiction(env, found, _NAMES[found.source])
        return
    if torchrun.AGENT in env:
        return
    for detector in [DETECTORS[source] for source in _NAMES]:
        try:
            other = detector(env)
        except PlacementError:
            continue  # left over from around us, and not what decides
        if isinstance(other, Placement):
            torchrun.refuse_contradiction(env, other, _NAMES[other.source])
            return


@cache
def others() -> dict[str, Detector]:
    """Load the detectors of other packages: entry points of the group ``distwrap.detectors``."""
    from importlib.metadata import entry_points

    return {point.name: point.load() for point in entry_points(group=ENTRY_POINTS)}
