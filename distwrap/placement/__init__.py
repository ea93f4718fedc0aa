"""Who am I: one detector a launcher, asked in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping

from distwrap.placement import own, torchrun
from distwrap.placement.base import Detector, Placement

__all__ = ["DETECTORS", "Placement", "detect"]

DETECTORS: dict[str, Detector] = {"distwrap": own.detect, "torchrun": torchrun.detect}


def detect(env: Mapping[str, str]) -> Placement:
    """Ask every detector in order; the first that knows decides, and a single process is the answer else.

    Raises:
        PlacementError: a launcher's variables are incomplete or contradictory.

    Example:
        >>> detect({}).source
        'single'
    """
    for detector in DETECTORS.values():
        placement = detector(env)
        if placement is not None:
            return placement
    return Placement()
