"""The fault matrix: which cells there are, and what a user has a right to see in each. Pure, nothing runs here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

LAUNCHERS = ("fork", "forkserver", "spawn", "script", "elastic", "torchrun")
FORKS = ("fork", "elastic")  # which start ranks by a fork, where this is safe
WHO = ("rank 0", "rank 1", "caller")
FAULTS = (
    "raise while others compute",
    "raise",
    "sys.exit(3)",
    "os._exit(3)",
    "SIGKILL",
    "SIGTERM",
    "SIGSEGV",
    "Ctrl-C",
    "infinite loop",
    "unpicklable exception",
    "exception while unpickling",
    "failing __del__",
    "full disk",
)
WHEN = ("before setup", "before the first step", "in a step", "in a loader worker", "in teardown")

SIGNALS = {"SIGKILL": 9, "SIGTERM": 15, "SIGSEGV": 11, "Ctrl-C": 2}
EXCEPTIONS = {
    "raise while others compute": "ValueError",
    "raise": "ValueError",
    "unpicklable exception": "Unpicklable",
    "exception while unpickling": "BreaksOnArrival",
}
TIMEOUT = 3.0  # of a collective, where a rank loops forever
LOOP_LIMIT = "FAULTS_TIMEOUT"  # a variable with another
LIMIT, AT_ONCE = 10.0, 5.0  # seconds until the caller knows: with a grace for somebody, and without


@dataclass(frozen=True)
class Cell:
    """One fault."""

    launcher: str
    who: str
    fault: str
    when: str

    @property
    def rank(self) -> int:
        """The rank that fails; for the caller, the one that reaches the place."""
        return 1 if self.who == "rank 1" else 0

    @property
    def is_callers_own(self) -> bool:
        """Whether it happens in the process of the caller."""
        return self.who == "caller" or (self.launcher == "script" and self.who == "rank 0")

    def __str__(self) -> str:
        return f"{self.launcher} | {self.who} | {self.fault} | {self.when}"


@dataclass(frozen=True)
class Expected:
    """What is to be seen.

    Attributes:
        raises: the exception in the caller, or empty.
        code: the exit code of the caller's process.
        words: patterns that the caller's error or standard error must hold.
        seconds: until the caller knows.
    """

    raises: str = ""
    code: int = 0
    words: tuple[str, ...] = ()
    seconds: float = AT_ONCE


def loop_limit() -> float:
    """Seconds for a collective where a rank loops forever."""
    return float(os.environ.get(LOOP_LIMIT, TIMEOUT))


def all_cells() -> Iterator[Cell]:
    """Every combination."""
    for combination in product(LAUNCHERS, WHO, FAULTS, WHEN):
        yield Cell(*combination)


def meaningless(cell: Cell) -> str:
    """Say why a combination cannot be, in a few words; empty where it can."""
    in_caller = cell.who == "caller"
    if in_caller and cell.launcher == "script":
        return "the caller is rank 0"
    if in_caller and cell.launcher == "torchrun" and cell.fault not in SIGNALS:
        return "the agent's code is torch's"
    ours = cell.when not in ("before setup", "in teardown")
    if in_caller and cell.launcher == "torchrun" and cell.fault in ("SIGKILL", "SIGSEGV") and not ours:
        return "distwrap is not at work"
    if in_caller and (cell.fault == "infinite loop" or "pickl" in cell.fault or "del" in cell.fault):
        return "the caller waits"
    if cell.fault == "full disk" and (in_caller or cell.launcher == "torchrun"):
        return "a file a rank" if in_caller else "torchrun's files"
    if cell.when == "in teardown" and cell.launcher == "elastic":
        return "multiprocessing runs no exit handlers"
    if cell.when == "in teardown" and cell.fault == "raise while others compute":
        return "the others have finished"
    if cell.when == "in teardown" and cell.fault == "full disk" and cell.is_callers_own:
        return "after the run"
    after_the_run = cell.launcher == "torchrun" or cell.is_callers_own
    if cell.when == "in teardown" and cell.fault == "infinite loop" and after_the_run:
        return "after the run"
    if cell.when == "before setup" and in_caller and cell.launcher in FORKS:
        return "no code of the user's there"
    if cell.when == "before setup" and not in_caller:
        if cell.launcher in FORKS and (cell.fault in EXCEPTIONS or cell.fault in ("sys.exit(3)", "Ctrl-C")):
            return "Python ignores exceptions there"
        if cell.launcher == "script" and cell.who == "rank 0":
            return "before the call"
        if cell.launcher in FORKS and cell.fault == "full disk":
            return "before its streams"
        if cell.launcher == "elastic" and cell.fault == "SIGTERM":
            return "as yet the agent's handler"
    return ""


def expected(cell: Cell) -> Expected:
    """Say what the caller has to see."""
    if cell.launcher == "torchrun":
        return _under_torchrun(cell)
    if cell.is_callers_own:
        return _in_the_caller(cell)
    if cell.fault == "failing __del__":
        return Expected(words=("Exception ignored in",), seconds=LIMIT)  # the run goes on, to its end
    if cell.fault == "full disk":
        words = (
            rf"rank_{cell.rank}\.stdout\.log'?: No space left"
            if cell.launcher == "elastic"
            else (rf"rank_{cell.rank}\.stdout\.log is not complete: .*No space left")
        )
        return Expected(words=(words,), seconds=LIMIT)
    if cell.when == "in teardown":
        return _in_teardown(cell)
    if cell.when == "before setup" and cell.launcher == "script":
        return _in_a_script_before_the_call(cell)
    if cell.when == "in a loader worker":
        return _in_a_loader_worker(cell)
    rank = rf"rank {cell.rank} on "
    if cell.fault == "infinite loop":
        if cell.when == "before setup":
            return Expected("ArrivalError", 1, (rf"1 of 2 ranks are here; missing: rank {cell.rank}",), LIMIT)
        places = (rf"rank {1 - cell.rank} in \w+ at program\.py", rf"rank {cell.rank} in \w+ at program\.py")
        return Expected("CollectiveTimeoutError", 1, places, LIMIT)
    if cell.fault in ("unpicklable exception", "exception while unpickling"):
        return Expected("WorkerError", 1, (rank, EXCEPTIONS[cell.fault]))
    if cell.fault in EXCEPTIONS:
        return Expected("ValueError", 1, (rank, "the fault"))
    if cell.fault == "sys.exit(3)":
        return Expected("SystemExit", 3, (rank, r"called sys\.exit\(3\)"))
    if cell.fault == "os._exit(3)":
        return Expected("WorkerDiedError", 1, (rank, "exit code 3"))
    if cell.fault == "Ctrl-C":
        return Expected("KeyboardInterrupt", -2, (rank,))
    return Expected("WorkerDiedError", 1, (rank, f"killed by {cell.fault}"))


def _in_the_caller(cell: Cell) -> Expected:
    """The caller's own end: its exception, or its death; for rank 0 of the script launcher too."""
    if cell.fault == "failing __del__":
        return Expected(words=("Exception ignored in",), seconds=LIMIT)  # the run goes on, to its end
    if cell.fault == "full disk":
        return Expected(words=(rf"rank_{cell.rank}\.stdout\.log is not complete: .*No space left",), seconds=LIMIT)
    if cell.when == "in teardown" and cell.who == "rank 0":
        # An exit handler of its own process, after the run: what it raises Python prints and forgets.
        if cell.fault in ("SIGKILL", "SIGTERM", "SIGSEGV"):
            return Expected(code=-SIGNALS[cell.fault])
        return Expected(code=3 if cell.fault == "os._exit(3)" else 0)
    if cell.when == "in a loader worker" and cell.who == "rank 0":
        return _in_a_loader_worker(cell)
    if cell.fault == "infinite loop":
        return Expected("CollectiveTimeoutError", 1, (r"rank 1 in \w+ at program\.py", r"rank 0 in"), LIMIT)
    if cell.fault in EXCEPTIONS:
        return Expected(EXCEPTIONS[cell.fault], 1, ("the fault",), LIMIT if cell.who == "caller" else AT_ONCE)
    if cell.fault in ("sys.exit(3)", "os._exit(3)"):
        return Expected("SystemExit" if cell.fault == "sys.exit(3)" else "", 3, (), LIMIT)
    if cell.fault == "Ctrl-C":
        return Expected("KeyboardInterrupt", -2, (), LIMIT)
    if cell.fault == "SIGTERM" and cell.launcher == "elastic":
        return Expected("SystemExit", 143, (), LIMIT)  # torch's agent hears it
    return Expected(code=-SIGNALS[cell.fault], seconds=LIMIT)


def _in_teardown(cell: Cell) -> Expected:
    """After the rank has done its work: the result is home, and a bad end costs a warning."""
    if cell.launcher == "script":
        return Expected(seconds=LIMIT)  # parked ranks are let go at the caller's own end
    if cell.fault == "infinite loop":
        return Expected(words=(rf"rank {cell.rank} on .* did not end within 7 s",), seconds=LIMIT)
    if cell.fault == "os._exit(3)":
        return Expected(
            words=(
                rf"rank {cell.rank} on .* its result is complete, but afterwards its process failed: "
                r"exit "
                r"code "
                r"3",
            )
        )
    if cell.fault in ("SIGKILL", "SIGTERM", "SIGSEGV"):
        return Expected(
            words=(
                rf"rank {cell.rank} on .* its result is complete, but afterwards its process failed: "
                r"killed "
                r"by "
                rf"{cell.fault}",
            )
        )
    return Expected()  # what an exit handler raises Python prints and forgets


def _in_a_script_before_the_call(cell: Cell) -> Expected:
    """Rank 1 has not come to the call yet, so all that is known of it is how its process ended."""
    if cell.fault == "infinite loop":
        return Expected("ArrivalError", 1, ("1 of 2 ranks are here; missing: rank 1",), LIMIT)
    ends = {"sys.exit(3)": "exit code 3", "os._exit(3)": "exit code 3", "Ctrl-C": "killed by SIGINT"}
    ends.update({name: f"killed by {name}" for name in ("SIGKILL", "SIGTERM", "SIGSEGV")})
    return Expected("WorkerDiedError", 1, ("rank 1 on ", ends.get(cell.fault, "exit code 1")))


def _in_a_loader_worker(cell: Cell) -> Expected:
    """torch tells the rank of the end of its worker, and the rank the caller."""
    if cell.fault == "infinite loop":
        places = (rf"rank {1 - cell.rank} in \w+ at program\.py", rf"rank {cell.rank} in DataLoader at program\.py")
        return Expected("CollectiveTimeoutError", 1, places, LIMIT)
    who = () if cell.is_callers_own else (rf"rank {cell.rank} on ",)
    if cell.fault in ("unpicklable exception", "exception while unpickling"):
        return Expected(EXCEPTIONS[cell.fault] if cell.is_callers_own else "WorkerError", 1, (*who, "the fault"), LIMIT)
    if cell.fault in EXCEPTIONS:
        return Expected("ValueError", 1, (*who, "the fault"), LIMIT)
    # torch looks after its workers every few seconds, or when one of them ends.
    return Expected("RuntimeError|WorkerDiedError", 1, (*who, r"DataLoader worker"), LIMIT)


def _under_torchrun(cell: Cell) -> Expected:
    """The caller is torchrun: its exit code, and what it and the ranks print."""
    if cell.who == "caller":
        # Ctrl-C and SIGTERM it passes on, and reports; its exit code is its own.
        return Expected(code=1 if cell.fault in ("Ctrl-C", "SIGTERM") else -SIGNALS[cell.fault], seconds=LIMIT)
    if cell.fault == "failing __del__":
        return Expected(words=("Exception ignored in",), seconds=LIMIT)
    quiet = ("raise", "unpicklable exception", "exception while unpickling", "sys.exit(3)", "Ctrl-C")
    if cell.when == "in teardown" and cell.fault in quiet:
        return Expected(seconds=LIMIT)
    if cell.fault == "infinite loop":
        if cell.when == "before setup":
            return Expected(code=1, words=(rf"1 of 2 ranks are here; missing: rank {cell.rank}",), seconds=LIMIT)
        place = "DataLoader" if cell.when == "in a loader worker" else r"\w+"
        return Expected(code=1, words=(rf"rank {cell.rank} in {place} at program\.py",), seconds=LIMIT)
    root = rf"Root Cause (?s:.*)rank      : {cell.rank} "
    if cell.when == "in a loader worker" and cell.fault not in EXCEPTIONS:
        return Expected(code=1, words=(root, r"DataLoader worker"), seconds=LIMIT)
    if cell.fault in EXCEPTIONS:
        return Expected(code=1, words=(root, rf"{EXCEPTIONS[cell.fault]}.*the fault"), seconds=LIMIT)
    if cell.fault == "sys.exit(3)":  # torchrun may end the other rank first, and this one while it is leaving
        return Expected(code=1, words=(root, "exitcode  : 3 |SystemExit: 3"), seconds=LIMIT)
    number = {"os._exit(3)": "3 ", "Ctrl-C": "(-2|1) "}.get(cell.fault)
    end = rf"exitcode  : {number or -SIGNALS[cell.fault]}"
    return Expected(code=1, words=(root, end), seconds=LIMIT)


def tenth(cells: Iterable[Cell], share: float = 0.1) -> list[Cell]:
    """Pick a tenth that touches every row and column, and as many pairs of them as it can.

    Greedy: always the cell with most pairs that no other has touched, the cheap launchers first among equals.
    """
    left = list(cells)
    cost = {launcher: index for index, launcher in enumerate(LAUNCHERS)}
    left.sort(key=lambda cell: (cost[cell.launcher], str(cell)))
    size = round(len(left) * share)
    touched: set[tuple[str, str]] = set()
    picked: list[Cell] = []
    while left and len(picked) < size:
        best = max(left, key=lambda cell: len(_pairs(cell) - touched))
        left.remove(best)
        picked.append(best)
        touched |= _pairs(best)
    return picked


def _pairs(cell: Cell) -> set[tuple[str, str]]:
    parts = (cell.launcher, cell.who, cell.fault, cell.when)
    return {(a, b) for index, a in enumerate(parts) for b in parts[index + 1 :]}
