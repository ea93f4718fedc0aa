"""Run cells of the fault matrix as real processes, and check what the caller sees and what is left behind.

python -m tests.faults.run                  the whole matrix, as a table
python -m tests.faults.run --only fork SIGKILL --jobs 2 --write benchmarks/faults-matrix.md
python -m tests.faults.run --times 100 --busy   each launcher and fault a hundred times, with all cores busy
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.faults.cells import (
    LIMIT,
    LOOP_LIMIT,
    TIMEOUT,
    WHEN,
    Cell,
    Expected,
    all_cells,
    expected,
    loop_limit,
    meaningless,
)

ROOT = Path(__file__).parent.parent.parent
PROGRAM = Path(__file__).parent / "program.py"
PATIENCE = 60.0  # seconds for a program to end, from the fault
ARRIVAL = 240.0  # seconds for it to come there, in which busy cores may still be importing torch

LATE = "known after"

PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Seen:
    """What came of a cell.

    Attributes:
        seconds: from the fault to the moment when the caller knew.
        wrong: what was not as expected, in words.
    """

    cell: Any
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def verdict(self) -> str:
        """Right; late, where that is all that is wrong; or wrong."""
        late = [words for words in self.wrong if words.startswith(LATE)]
        return "right" if not self.wrong else "late" if late == self.wrong else "wrong"


def run(
    cell: Any, *, slack: float = 1.0, wanted: Expected | None = None, main: Callable[[Any], None] | None = None
) -> Seen:
    """Run a cell.

    Args:
        cell: the fault.
        slack: how many times longer than expected it may take until the caller knows, as on busy cores.
        wanted: what the caller has to see; by default as in the fault matrix.
        main: the caller, which is forked; by default that of the fault matrix.
    """
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and hand that down
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        temporary = folder / "temporary"
        temporary.mkdir()
        code = _wait(_start(cell, folder, main), folder / "struck")
        ended = time.time()
        seen = Seen(cell)
        gone = _wait_for_descendants(ended + LIMIT)
        seen.output = (folder / "output").read_text(errors="replace")
        try:
            _judge(seen, wanted or expected(cell), code, folder, ended, slack)
        except Exception:  # noqa: BLE001 - a cell that cannot be judged has failed
            seen.wrong.append(traceback.format_exc())
        seen.wrong += [f"left: process {line}" for line in gone]
        seen.wrong += [f"left: file {path.name}" for path in temporary.iterdir() if not _may_stay(path, cell)]
        seen.wrong += [f"left: shared memory {name}" for name in _abandoned(shared)]
    return seen


def _judge(seen: Seen, wanted: Expected, code: int | None, folder: Path, ended: float, slack: float) -> None:
    cell = seen.cell
    if code is None:
        seen.wrong.append(f"it did not end within {PATIENCE:g} s of the fault")
        return
    note = folder / "seen"
    told: dict[str, Any] = json.loads(note.read_text()) if note.exists() and note.read_text() else {}
    struck = folder / "struck"
    if not struck.exists() or not struck.read_text():
        seen.wrong.append("the fault did not strike")
        return
    known = told["time"] if "raises" in told else ended
    seen.seconds = max(0.0, known - float(struck.read_text()))
    seconds = wanted.seconds + (loop_limit() - TIMEOUT) * (cell.fault == "infinite loop")
    if seen.seconds > slack * seconds:
        seen.wrong.append(f"{LATE} {seen.seconds:.1f} s, not within {seconds:g} s")
    if cell.launcher != "torchrun" and told.get("raises", "") not in wanted.raises.split("|"):
        seen.wrong.append(f"raised {told.get('raises') or 'nothing'}, not {wanted.raises or 'nothing'}")
    if cell.launcher != "torchrun" and not wanted.raises and wanted.code == 0 and told.get("value") != "whole":
        seen.wrong.append(f"returned {told.get('value')!r}")
    if code != wanted.code:
        seen.wrong.append(f"exit code {code}, not {wanted.code}")
    text = told.get("text", "") + "\n" + seen.output
    seen.wrong += [f"{words!r} is nowhere" for words in wanted.words if not re.search(words, text)]
    seen.wrong += filter(None, [told.get("wrong")])
    if told.get("environ"):
        seen.wrong.append(f"left: variables {told['environ']}")


def _may_stay(path: Path, cell: Any) -> bool:
    """Say whether torch alone has left this file, or nobody was left to remove it, so that the next launch does."""
    dies = cell.who == "caller" and cell.fault in ("os._exit(3)", "SIGKILL", "SIGSEGV")
    if cell.launcher == "elastic" and dies and path.name.startswith("distwrap-restarts-"):
        return True
    # When a worker's socket is gone, torch's loader makes ten files to see whether it still can, and the news of the
    # worker's death, an exception in a signal's handler, may find it between one file's making and removal.
    between = cell.when == "in a loader worker" and path.name.startswith("tmp") and path.stat().st_size == 0
    if cell.launcher == "torchrun":  # its log folder; and it ends loader workers without letting anybody clean up
        return between or path.name.startswith(("torch", "distwrap-"))
    return between or path.name.startswith("torchinductor")


def _start(cell: Any, folder: Path, main: Callable[[Any], None] | None) -> int:
    """Start the caller: a fork of this process where that does no harm, else a fresh interpreter."""
    env = {"TMPDIR": str(folder / "temporary"), "DISTWRAP_QUIET": "1", "PYTHONUNBUFFERED": "", "PYTHONWARNINGS": ""}
    with open(folder / "output", "wb") as output:
        if cell.launcher in ("fork", "forkserver"):
            return _fork(cell, folder, env, output.fileno(), main)
        command = [sys.executable, str(PROGRAM), cell.launcher, cell.who, cell.fault, cell.when]
        if cell.launcher == "torchrun":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **env, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ).pid


def _fork(cell: Any, folder: Path, env: dict[str, str], output: int, main: Callable[[Any], None] | None) -> int:
    import tests.faults.program as program

    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for number in (1, 2):
            os.dup2(output, number)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(env)
        tempfile.tempdir = None
        os.chdir(folder)
        import atexit

        atexit._clear()
        code = _as_an_interpreter_would(main or program.main, cell)
        atexit._run_exitfuncs()
    finally:
        os._exit(code)


def _as_an_interpreter_would(main: Callable[[Any], None], cell: Any) -> int:
    try:
        main(cell)
    except SystemExit as error:
        return int(error.code or 0)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 1
    return 0


def adopt_orphans() -> None:
    """Become the parent of whatever a caller leaves behind, to find it (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _wait(pid: int, struck: Path) -> int | None:
    deadline, has_struck = time.monotonic() + ARRIVAL, False
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if not has_struck and struck.exists():
            deadline, has_struck = time.monotonic() + PATIENCE, True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _abandoned(before: set[str]) -> list[str]:
    """Return torch's shared memory of processes that are gone; what runs beside us has some too, for moments."""
    names: list[str] = []
    for pause in (0, 0.5):
        time.sleep(pause)
        new = set(os.listdir("/dev/shm")) - before
        names = [name for name in new if name.startswith("torch_") and not Path("/proc", name.split("_")[1]).exists()]
        if not names:
            break
    return names


def _wait_for_descendants(deadline: float) -> list[str]:
    """Wait until all that the caller has started is gone; end what is not, and return it."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        alive = list(_descendants(os.getpid()))
        if not alive:
            return []
        if time.time() > deadline:
            break
        time.sleep(0.02)
    for pid, _ in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid}: {command}" for pid, command in alive]


def _descendants(pid: int) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()):
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                        yield child, command[:200]
                yield from _descendants(child)


def table(results: Sequence[Seen]) -> str:
    """The matrix: a row for launcher, who and fault, a column for when; seconds until the caller knew."""
    by_cell: dict[Cell, list[Seen]] = {}
    for seen in results:
        by_cell.setdefault(seen.cell, []).append(seen)
    rows: dict[tuple[str, str, str], None] = {}
    for cell in all_cells():
        if any(Cell(cell.launcher, cell.who, cell.fault, when) in by_cell for when in WHEN):
            rows[cell.launcher, cell.who, cell.fault] = None
    lines = ["| launcher | who | fault | " + " | ".join(WHEN) + " |", "|---" * (3 + len(WHEN)) + "|"]
    for launcher, who, fault in rows:
        entries = []
        for when in WHEN:
            cell = Cell(launcher, who, fault, when)
            entries.append(_entry(by_cell[cell]) if cell in by_cell else meaningless(cell) and f"({meaningless(cell)})")
        lines.append(f"| {launcher} | {who} | {fault} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def _entry(runs: Sequence[Seen]) -> str:
    failed = sum(bool(seen.wrong) for seen in runs)
    middle = sorted(seen.seconds for seen in runs)[len(runs) // 2]
    return f"{middle:.1f} s" if not failed else f"**{failed} of {len(runs)} fail**" if len(runs) > 1 else "**fails**"


def counts(results: Sequence[Seen], names: Sequence[str] = ("launcher", "fault")) -> str:
    """The table of runs under load: a row for what cells have in common, and how many of its runs were right."""
    rows: dict[tuple[str, ...], list[Seen]] = {}
    for seen in results:
        rows.setdefault(tuple(getattr(seen.cell, name) for name in names), []).append(seen)
    columns = [*names, "right", "late", "wrong", "median", "slowest"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row, runs in rows.items():
        number = Counter(seen.verdict for seen in runs)
        seconds = sorted(seen.seconds for seen in runs)
        numbers = f"{number['right']} | {number['late']} | {number['wrong']}"
        lines.append(f"| {' | '.join(row)} | {numbers} | {seconds[len(runs) // 2]:.1f} s | {seconds[-1]:.1f} s |")
    return "\n".join(lines)


def in_turns(
    cells: Sequence[Any], times: int, done: Sequence[Seen] = (), names: Sequence[str] = ("launcher", "fault")
) -> list[Any]:
    """Each launcher and fault so many times: who fails, and when, in turns. What was done before is left out."""
    rows: dict[tuple[str, ...], list[Any]] = {}
    for cell in cells:
        rows.setdefault(tuple(getattr(cell, name) for name in names), []).append(cell)
    number = Counter(tuple(getattr(seen.cell, name) for name in names) for seen in done)
    turns = [turn for row, own in rows.items() for turn in islice(enumerate(cycle(own)), number[row], times)]
    return [cell for _, cell in sorted(turns, key=lambda turn: turn[0])]  # so that one that is stopped has some of each


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy, each with a process that ends with this one."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    burners = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def seen_before(path: Path | None, cells: Sequence[Any]) -> list[Seen]:
    """Return what is kept in a file of a line a run."""
    if path is None or not path.exists():
        return []
    kept = [Seen(type(cells[0])(*parts), seconds, wrong) for parts, seconds, wrong in map(json.loads, path.open())]
    return [seen for seen in kept if seen.cell in set(cells)]


def options_of(text: str | None) -> argparse.ArgumentParser:
    """Return the options of a program that runs cells."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that a cell must hold")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--write", type=Path, help="write the table there")
    parser.add_argument("--resume", type=Path, help="keep results there, and run only what is missing")
    parser.add_argument("--times", type=int, help="run each launcher, or strategy, and fault so many times, and count")
    parser.add_argument("--busy", action="store_true", help="keep all cores busy meanwhile")
    return parser


def results_of(
    cells: Sequence[Any],
    options: argparse.Namespace,
    run: Callable[[Any], Seen] = run,
    names: Sequence[str] = ("launcher", "fault"),
) -> list[Seen]:
    """Run cells, print what is seen, and return it with what was seen before.

    Args:
        cells: all that there are.
        options: of the command.
        run: runs one.
        names: of what cells have in common that are counted together.
    """
    cells = [cell for cell in cells if all(word in str(cell).replace(" | ", "|").split("|") for word in options.only)]
    if not cells:
        sys.exit(f"no cell holds all of these words: {' '.join(options.only)}")
    results = seen_before(options.resume, cells)
    if options.times:
        cells = in_turns(cells, options.times, results, names)
    else:
        results = [seen for seen in results if not seen.wrong]
        cells = [cell for cell in cells if cell not in {seen.cell for seen in results}]
    if options.busy:
        os.environ[LOOP_LIMIT] = "10"  # which holds for the ranks' arrival too
    # Each worker has its own orphans, and forks callers of its own.
    load = busy_cores() if options.busy else contextlib.nullcontext()
    with load, ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for seen in pool.map(run, cells):
            results.append(seen)
            print(f"{seen.verdict:5} {seen.seconds:5.1f} s  {seen.cell}", flush=True)
            if options.resume:
                with options.resume.open("a") as file:
                    print(json.dumps([[*vars(seen.cell).values()], seen.seconds, seen.wrong]), file=file)
            if seen.wrong:
                print("      " + "\n      ".join(seen.wrong), flush=True)
    return results


def summary_of(results: Sequence[Seen]) -> str:
    """Return in a line how many cells fail, and when the caller knew."""
    slowest = max((seen.seconds for seen in results), default=0.0)
    return (
        f"{len(results)} cells, of which {sum(bool(seen.wrong) for seen in results)} fail; the caller knew after "
        f"{sorted(seen.seconds for seen in results)[len(results) // 2]:.1f} s (median), {slowest:.1f} s at most."
    )


def main() -> int:
    """Run the matrix, and print it."""
    options = options_of(__doc__).parse_args()
    results = results_of([cell for cell in all_cells() if not meaningless(cell)], options)
    summary = summary_of(results)
    text = f"{counts(results)}\n\n{table(results)}" if options.times else table(results)
    print(text)
    print(summary)
    if options.write:
        head = HEAD_OF_COUNTS.format(times=options.times, load=", all cores busy" * options.busy)
        options.write.write_text(f"{head if options.times else HEAD}\n\n{summary}\n\n{text}\n")
    return any(seen.wrong for seen in results)


HEAD = f"""# The fault matrix

Written by `python -m tests.faults.run`: every meaningful combination of launcher, culprit, fault and moment, on real
processes. An entry is the time from the fault until the caller knew, with the exception or exit code that
`tests/faults/cells.py` expects (rank and first cause named), at most {LIMIT:g} s, and nothing left behind: no process,
file, shared memory or variable (under torchrun its log folder, and the sockets of loader workers that it ends, are not
counted; nor, where the caller of elastic is killed, its folder, which the next launch removes). An infinite loop is
known {3:g} s later than other faults, since that is the time limit of its collectives."""

HEAD_OF_COUNTS = f"""# The fault matrix, under load

Written by `make faults`: each launcher and fault {{times}} times{{load}}, with
who fails and when in turns. Right is what the fault matrix asks for: the exception or exit code, the rank, the first
cause, nothing left behind, within {LIMIT:g} s at most. Late is right but for the time; wrong is anything else, a hang
included. The second table has the median of each combination's runs. An infinite loop is known 10 s later than other
faults, the time limit of its collectives. Not counted as left behind are, under torchrun, its log folder, and the
sockets of loader workers that it ends, and, where the caller of elastic is killed, its folder, which the next launch
removes."""


if __name__ == "__main__":
    sys.exit(main())
