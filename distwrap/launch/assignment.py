"""Instructions for a rank: what it is to run, and what it must share with the caller for that."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Literal

from distwrap.environments import Placement
from distwrap.seeding import RandomState

Returns = Literal["rank0", "all", "gathered"]


@dataclass(frozen=True)
class Surroundings:
    """State of a process in which the caller's function would run as it does in the caller."""

    environ: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]
    umask: int
    random: RandomState

    @classmethod
    def capture(cls) -> Surroundings:
        """Read the surroundings of this process."""
        umask = os.umask(0)
        os.umask(umask)
        return cls(dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv), umask, RandomState.capture())

    def restore(self) -> None:
        """Make this process like the one whose surroundings these are."""
        if dict(os.environ) != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        os.chdir(self.directory)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        os.umask(self.umask)
        self.random.restore()


@dataclass(frozen=True)
class Assignment:
    """Instructions for one rank; those of the ranks of a launch differ in the placement alone.

    Attributes:
        launcher: the launcher's name, for the line at the start.
        returns: whose value goes home: rank 0's, each rank's own, or rank 0's list of all that the ranks gather.
        threads: number of threads to compute with; ``None`` leaves it to the user's variables.
        payload: the packed task; ``None`` where the rank has it, as a fork does.
        surroundings: ``None`` where the rank has them.
        main_path: script to import before the payload is unpacked, where something in it goes by reference.
        placement: the rank's place among the others.
        store: where the ranks meet: a file, or ``"tcp://host:port/launch"``. Empty where they meet at the placement's
            address, as torchrun's do; nobody then stands by to end them all when one fails.
    """

    launcher: str
    returns: Returns = "rank0"
    threads: int | None = None
    payload: bytes | None = None
    surroundings: Surroundings | None = None
    main_path: str | None = None
    placement: Placement = field(default_factory=Placement)
    store: str = ""
