"""Faults in programs that train a divided model, and what a user has a right to see of each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from tests.faults.cells import AT_ONCE, LIMIT, TIMEOUT, Expected, loop_limit

AT = 2  # the step in which it happens
PLACES = {  # of faults that are one rank's own
    "raise in a forward": "in a forward",
    "raise in a block": "in a block",
    "raise in a backward": "in a backward",
    "raise before a step": "before a step",
    "out of memory": "in a block",
    "sys.exit(3) in a block": "in a block",
    "SIGKILL in a block": "in a block",
    "SIGKILL in a backward": "in a backward",
    "SIGKILL in a save": "in a save",
    "SIGKILL in a save of parts": "in a save",
    "SIGKILL in a load": "in a load",
    "SIGKILL in a load of parts": "in a load",
    "infinite loop": "in a block",
    "catch and go on": "in a block",
    "Ctrl-C": "in a block",
}
ODD = (  # what one rank does, and the others do not
    "evaluate alone",
    "evaluate while others skip a unit",
    "save alone",
    "save parts alone",
    "skip a batch",
    "skip a unit",
    "other order",
    "other batch",
    "return early",
    "clip alone",
    "step alone",
)
NAMES = ("fsdp", "hsdp", "zero1", "tp", "fsdp+tp", "pipeline", "two pipelines")


@dataclass(frozen=True)
class DividedCell:
    """One fault under one strategy."""

    strategy: str
    who: str
    fault: str

    launcher: ClassVar[str] = "fork"  # of a caller that has imported all that ranks need
    when: ClassVar[str] = ""

    @property
    def rank(self) -> int:
        """The rank that fails, or does what the others do not."""
        return 1 if self.who == "rank 1" else 0

    @property
    def waits(self) -> bool:
        """Whether the time limit of collectives ends it."""
        if self.strategy == "zero1":  # of which a rank that steps waits for the others' weights
            return self.fault in ("infinite loop", "step alone", "skip a unit", "evaluate while others skip a unit")
        return self.fault in ("infinite loop", "clip alone")

    def __str__(self) -> str:
        return f"{self.strategy} | {self.who} | {self.fault}"


def all_cells() -> Iterator[DividedCell]:
    """Every combination that means something."""
    for cell in (DividedCell(*each) for each in product(NAMES, ("rank 0", "rank 1"), (*PLACES, *ODD))):
        if cell.fault != "other batch" or cell.strategy not in ("fsdp", "hsdp", "zero1"):  # where all batches differ
            yield cell


def expected(cell: DividedCell) -> Expected:
    """Say what the caller has to see."""
    here, rank, fault = rf"rank {cell.rank} on ", rf"rank {cell.rank}\b", cell.fault
    in_stages, by_tensor = "pipeline" in cell.strategy, "tp" in cell.strategy
    if fault == "Ctrl-C":
        return Expected("KeyboardInterrupt", -2, (), LIMIT)
    if fault.startswith("raise"):
        return Expected("ValueError", 1, (here, "the fault"))
    if fault == "out of memory":
        return Expected("OutOfMemoryError", 1, (here, "the fault"))
    if fault.startswith("sys.exit"):
        return Expected("SystemExit", 3, (here, r"called sys\.exit\(3\)"))
    if fault.startswith("SIGKILL"):
        return Expected("WorkerDiedError", 1, (here, "killed by SIGKILL"))
    if fault == "infinite loop":
        return Expected("CollectiveTimeoutError", 1, (rf"{rank} (in|at) .*divided_program\.py",), LIMIT)
    if cell.waits:
        seconds = LIMIT + loop_limit() - TIMEOUT
        return Expected("CollectiveTimeoutError|CollectiveError", 1, (r"ranks? [\d, and-]+ (in|at) \w+",), seconds)
    if fault.startswith("save"):
        return Expected("CheckpointError", 1, (rf"{rank} is in save\(\) to .*did not call it",), LIMIT)
    if cell.strategy == "zero1" and fault in ("evaluate alone", "other order", "clip alone"):
        return Expected(seconds=LIMIT)  # no exchange depends on it
    if fault in ("skip a unit", "other order", "other batch"):
        return Expected("ModelError", 1, (rank,), LIMIT)
    if fault == "step alone":
        return Expected("DriftError", 1, (rank,), LIMIT)
    if fault == "evaluate while others skip a unit":
        return Expected("CollectiveError|ModelError", 1, (r"rank \d",), LIMIT)  # of another pipeline, perhaps
    if fault == "evaluate alone" or (fault == "catch and go on" and not in_stages and cell.strategy != "zero1"):
        return Expected("CollectiveError", 1, (r"rank \d+ runs forward .* and rank \d+ ",), AT_ONCE)
    if fault == "catch and go on" and in_stages:
        return Expected("CollectiveError", 1, (rf"{rank} of this pipeline raised",), LIMIT)
    if fault == "skip a batch" and (in_stages or by_tensor):  # the ranks compare their batches now and then
        return Expected("CollectiveError|ModelError", 1, (rank,), LIMIT)
    return Expected("CollectiveError", 1, (rank,), LIMIT)
