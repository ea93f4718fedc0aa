"""Detection of the launcher, the doctor, two nodes, restarts: distwrap beside hand-written torch under torchrun.

Two processes on this machine stand in for two nodes. Every run does the same: meet, one all-reduce, return.

    python benchmarks/clusters.py [--quick] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from command_line import arguments, compare
from ports import free_port
from samples import Samples, in_turns, per_call
from table import Row, report

from distwrap.environments import detect

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1024",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "n[0001-0128]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x128)",
}

OURS = """
import os, sys, time, torch, distwrap
@distwrap.distributed
def main():
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    distwrap.reduce(torch.ones(1))
    if again:
        print(f"AGAIN {time.time()}", flush=True)
    elif sys.argv[1:] and distwrap.rank() == 1:
        print(f"DEAD {time.time()}", flush=True)
        os.kill(os.getpid(), 9)
    distwrap.barrier()
if __name__ == "__main__":
    main()
"""

THEIRS = """
import os, sys, time, torch, torch.distributed as dist
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if again:
    print(f"AGAIN {time.time()}", flush=True)
elif sys.argv[1:] and dist.get_rank() == 1:
    print(f"DEAD {time.time()}", flush=True)
    os.kill(os.getpid(), 9)
dist.barrier()
dist.destroy_process_group()
"""

HANGS_SECONDS = 20.0

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def main() -> None:
    args = arguments(__doc__)
    if args.against:
        compare(__file__, args)
        return
    rounds = 1 if args.short else 7
    with tempfile.TemporaryDirectory() as folder:
        measured = [
            detection(2 if args.quick else 20),
            doctor(rounds),
            two_nodes(Path(folder), rounds),
            restart(Path(folder), rounds),
        ]
    rows = [each for each in measured if isinstance(each, Row)]
    notes = [each for each in measured if isinstance(each, str)]
    report("clusters: two processes on this machine stand in for two nodes, gloo", rows, notes, args)


def detection(rounds: int) -> Row:
    """Time the detection of the launcher, in a big Slurm step and where there is none."""
    taken = in_turns({"step": per_call(lambda: detect(SLURM), 200), "alone": per_call(lambda: detect({}), 200)}, rounds)
    slowest = max(taken.values(), key=lambda samples: samples.median)
    figure = f"{slowest.median * 1e6:.0f} us"
    met = slowest.median < 1e-3
    return Row("who am I: the slower of a Slurm step, nobody", slowest, None, "us", figure, "< 1 ms", met)


def doctor(rounds: int) -> Row:
    """Time the doctor with two ranks, from the shell."""

    def once() -> float:
        return _timed([sys.executable, "-m", "distwrap", "doctor", "--nprocs", "2"])

    taken = Samples(in_turns({"ours": once}, max(1, rounds // 2))["ours"].seconds)
    return Row("doctor, 2 ranks", taken, None, "s", f"{taken.median:.1f} s", "< 15 s", taken.median < 15)


def two_nodes(folder: Path, rounds: int) -> Row | str:
    """Time the same command on both, from the shell to the end of both."""
    ours, theirs = _programs(folder)

    def with_decorator() -> float:
        env = {"DISTWRAP_NNODES": "2", "DISTWRAP_NPROCS": "1", "DISTWRAP_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
        return _timed(*[[sys.executable, str(ours)]] * 2, env=env)

    def with_torchrun() -> float:
        words = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        return _timed(*([*TORCHRUN, *words, f"--node-rank={i}", str(theirs)] for i in range(2)))

    what = "two nodes, a rank each, from the shell to the end: decorator, torchrun"
    taken = _in_turns_or_alone(what, with_decorator, with_torchrun, rounds)
    if isinstance(taken, str):
        return taken
    ratio = taken["ours"].over(taken["theirs"])
    return Row(what, taken["ours"], taken["theirs"], "s", f"{ratio:.2f} times", "<= 1", ratio <= 1)


def restart(folder: Path, rounds: int) -> Row | str:
    """Time from a rank's death to the first all-reduce of the next attempt."""
    ours, theirs = _programs(folder)

    def with_decorator() -> float:
        env = {"DISTWRAP_NPROCS": "2", "DISTWRAP_MAX_RESTARTS": "1"}
        return _between([sys.executable, str(ours), "die"], env)

    def with_torchrun() -> float:
        words = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
        return _between([*TORCHRUN, *words, str(theirs), "die"], {})

    what = "restart, 2 ranks, from a death to the first all-reduce: decorator, torchrun"
    taken = _in_turns_or_alone(what, with_decorator, with_torchrun, rounds)
    if isinstance(taken, str):
        return taken
    times = taken["theirs"].median / taken["ours"].median
    return Row(what, taken["ours"], taken["theirs"], "s", f"{times:.1f} times faster")


def _in_turns_or_alone(
    what: str, ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> dict[str, Samples] | str:
    """Time both in turns; where theirs fails, return a note that quotes it beside as many rounds of ours."""
    mine: list[float] = []

    def kept() -> float:
        mine.append(ours())
        return mine[-1]

    try:
        return in_turns({"ours": kept, "theirs": theirs}, rounds)
    except RuntimeError as error:
        while len(mine) < rounds:
            kept()
        return f"{what}: {Samples(mine).text('s')} beside {error}"


def _programs(folder: Path) -> tuple[Path, Path]:
    ours, theirs = folder / "ours.py", folder / "theirs.py"
    ours.write_text(OURS)
    theirs.write_text(THEIRS)
    return ours, theirs


def _timed(*commands: list[str], env: dict[str, str] | None = None) -> float:
    start = time.perf_counter()
    running = [_started(command, env or {}) for command in commands]
    try:
        outputs = [_output(process) for process in running]
    finally:
        for process in running:
            _end(process)
    taken = time.perf_counter() - start
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{_short(process)}, which failed: {output[-300:]}")
    return taken


def _between(command: list[str], env: dict[str, str]) -> float:
    process = _started(command, env)
    output = _output(process)
    found = {what: float(when) for what, when in re.findall(r"(DEAD|AGAIN) ([\d.]+)", output)}
    if process.returncode or "AGAIN" not in found:
        told = re.findall(r"RuntimeError: (.*)|(Connection refused)", output)
        raise RuntimeError(f"{_short(process)}, which failed: {max(told[-1]) if told else output[-300:]}")
    return found["AGAIN"] - found["DEAD"]


def _output(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=HANGS_SECONDS)[0]
    except subprocess.TimeoutExpired:
        _end(process)
        raise RuntimeError(f"{_short(process)}, which failed: it hangs (> {HANGS_SECONDS:g} s)") from None


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        for pid in [process.pid, *_descendants(process.pid)]:  # torchrun's workers are in sessions of their own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def _short(process: subprocess.Popen[str]) -> str:
    return " ".join(Path(word).name for word in process.args[1:3])  # type: ignore[index, union-attr]


def _started(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


if __name__ == "__main__":
    main()
