"""Detection of the launcher that started this process, by a detector for each launcher; the first that knows decides.

The order: ranks that distwrap itself started; torch's complete set; Horovod, Open MPI, MVAPICH2, MPICH, PALS, jsrun; a
Slurm step, since mpirun and torchrun inherit the variables of the job around them; the detectors of other packages;
launchers that start one process on each node. All values come from one detector.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from distwrap import entry_points
from distwrap.environments import distwrap_environment, nodes, ranks, torchrun
from distwrap.environments.base import Detector, Node, Placement
from distwrap.errors import PlacementError
from distwrap.wording import print_notice

__all__ = ["DETECTORS", "NODE_DETECTORS", "Detector", "Node", "Placement", "detect", "detectors_of_packages", "explain"]

DETECTORS: dict[str, Detector] = {
    "distwrap": distwrap_environment.detect,
    "torchrun": torchrun.detect,
    **{variables.source: variables.detect for variables in ranks.LAUNCHERS},
    "slurm": ranks.detect_slurm,
}
NODE_DETECTORS: dict[str, Detector] = {
    "kubeflow": nodes.detect_kubeflow,
    "pai_dlc": nodes.detect_pai_dlc,
    "node_rank": nodes.detect_by_hand,
    "sagemaker": nodes.detect_sagemaker,
}

# Names that mean the same as RANK, WORLD_SIZE and LOCAL_RANK, and must not have other values.
_NAMES: dict[str, tuple[str, ...]] = {
    **{variables.source: variables.names[:3] for variables in ranks.LAUNCHERS},
    "slurm": ranks.SLURM_NAMES,
}


def detect(env: Mapping[str, str]) -> Placement | Node:
    """Return what the first detector that knows says; a single process where none does.

    Raises:
        PlacementError: a launcher's variables are incomplete, or contradict themselves or another launcher's.

    Example:
        >>> detect({}).source
        'single'
    """
    for name, detector in _in_order():
        found = detector(env)
        if isinstance(found, Placement) and name in DETECTORS:
            _check_others_agree(env, found, name)
        if not isinstance(found, str):
            return found
    torchrun.check_complete(env)
    ranks.check_pmix(env)
    return Placement()


def explain(env: Mapping[str, str]) -> dict[str, str]:
    """Return in words what each detector makes of the environment.

    Example:
        >>> explain({})["slurm"]
        'no SLURM_JOB_ID'
    """
    explanations = {}
    for name, detector in _in_order():
        try:
            found = detector(env)
        except PlacementError as error:
            found = f"refused: {error}"
        if isinstance(found, Node):
            found = f"yes: node {found.node_rank} of {found.nnodes}, which starts its ranks itself"
        elif isinstance(found, Placement):
            found = f"yes: rank {found.rank} of {found.world_size}, node {found.node_rank} of {found.nnodes}"
        explanations[name] = found
    return explanations


def _in_order() -> Iterator[tuple[str, Detector]]:
    yield from DETECTORS.items()
    yield from detectors_of_packages().items()
    yield from NODE_DETECTORS.items()


def _check_others_agree(env: Mapping[str, str], found: Placement, name: str) -> None:
    """Raise an error if another launcher that also started this very process says something else."""
    if name not in ("distwrap", "torchrun"):
        torchrun.check_agreement(env, found, _NAMES[name])
    if name != "torchrun" or torchrun.AGENT in env:
        return
    for source, names in _NAMES.items():
        try:
            other = DETECTORS[source](env)
        except PlacementError:
            continue  # left over from a launcher around this one, and not what decides
        if isinstance(other, Placement):
            torchrun.check_agreement(env, other, names)
            return


@cache
def detectors_of_packages() -> dict[str, Detector]:
    """Return the detectors of other packages: entry points of the group ``distwrap.detectors``."""
    found = entry_points.of_packages("distwrap.detectors").items()
    return {name if len(places) == 1 else place: _of_package(name, place) for name, places in found for place in places}


def _of_package(name: str, place: str) -> Detector:
    """Return the detector at ``"module:name"``, which is passed over where it is broken."""

    def detector(env: Mapping[str, str]) -> Placement | Node | str:
        try:
            found: object = entry_points.load(f"detector {name!r}", (place,))(env)
        except PlacementError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - rank() is not to fail for a package that the program may not need
            words = f"{type(error).__name__}: {error}"
            print_notice_once(f"the detector {name!r} of an installed package ({place}) failed and is ignored: {words}")
            return f"broken: {words}"
        if isinstance(found, Placement) and found.source == "single" and found.world_size > 1:
            return replace(found, source=name)
        if isinstance(found, (Placement, Node, str)):
            return found
        if found is None:
            return "no answer"
        raise PlacementError(
            f"the detector {name!r} of an installed package ({place}) has returned {found!r}: it must return a "
            f"Placement, a Node, or in words why its launcher has not started this process."
        )

    return detector


print_notice_once = cache(print_notice)
