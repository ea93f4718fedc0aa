"""Who am I: one detector a launcher, asked in a fixed order.

The order: what distwrap itself started; torch's complete set; Horovod, Open MPI, MVAPICH2, MPICH, PALS, jsrun; a Slurm
step, last of these, since mpirun and torchrun inherit the variables of the job around them; other packages' detectors;
then what knows the machine alone. All values come from the first that knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from distwrap.environments import distwrap_environment, mpi, nodes, slurm, torchrun
from distwrap.environments.base import Detector, Node, Placement
from distwrap.errors import PlacementError

__all__ = ["DETECTORS", "NODE_DETECTORS", "Detector", "Node", "Placement", "detect", "explain", "others"]

ENTRY_POINTS = "distwrap.detectors"

DETECTORS: dict[str, Detector] = {
    "distwrap": distwrap_environment.detect,
    "torchrun": torchrun.detect,
    **{launcher.source: launcher.detect for launcher in mpi.LAUNCHERS},
    "slurm": slurm.detect,
}
NODE_DETECTORS: dict[str, Detector] = {
    "kubeflow": nodes.kubeflow,
    "pai_dlc": nodes.pai_dlc,
    "node_rank": nodes.by_hand,
    "sagemaker": nodes.sagemaker,
}

# What else says the same thing as RANK, WORLD_SIZE and LOCAL_RANK, and must not say another.
_NAMES: dict[str, tuple[str, str, str]] = {
    **{launcher.source: launcher.names[:3] for launcher in mpi.LAUNCHERS},
    "slurm": slurm.NAMES,
}


def detect(env: Mapping[str, str]) -> Placement | Node:
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
    for detector in NODE_DETECTORS.values():
        found = detector(env)
        if isinstance(found, Node):
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
    for name, detector in {**DETECTORS, **others(), **NODE_DETECTORS}.items():
        try:
            found = detector(env)
        except PlacementError as error:
            said[name] = f"refused: {error}"
            continue
        said[name] = found if isinstance(found, str) else f"yes: {_words(found)}"
    return said


def _words(found: Placement | Node) -> str:
    if isinstance(found, Node):
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
