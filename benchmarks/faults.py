"""The ten most common faults: seconds until the caller knows, whether it says why, and what is left behind.

Each fault strikes rank 1 of 2 (or the caller), in a fresh process, under distwrap and under torchrun, Lightning Fabric,
Accelerate and torchrunx where these are installed. All have the same time limit for collectives, 5 s, where they let
one set it.

    python benchmarks/faults.py [--tools distwrap torchrun …] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

COLLECTIVE = 5.0  # seconds for a collective
PATIENCE = 40.0  # seconds from the fault; who does not know by then counts as hanging
SETTLE = 3.0  # seconds after the caller's end until what is left counts as left
NPROCS = 2

CULPRIT = r"rank\W*1\b|(?i:process 1|worker 1)"

# What the caller must print to have said why: the culprit, and what happened to it.
FAULTS: dict[str, tuple[str, str]] = {
    "rank raises": (CULPRIT, r"ValueError: the fault"),
    "rank raises, the other computes": (CULPRIT, r"ValueError: the fault"),
    "rank raises what cannot be pickled": (CULPRIT, r"Unpicklable"),
    "rank exits (os._exit)": (CULPRIT, r"(?i)exit ?code\W*3"),
    "rank is killed (out of memory)": (CULPRIT, r"SIGKILL|-9|signal 9"),
    "rank crashes (SIGSEGV)": (CULPRIT, r"SIGSEGV|Segmentation|-11|signal 11"),
    "rank loops forever": (CULPRIT, r"faults\.py:\d+|line \d+, in endless"),
    "loader worker is killed": (CULPRIT, r"DataLoader worker"),
    "Ctrl-C": (r"", r"KeyboardInterrupt|SIGINT|signal 2|interrupt"),
    "caller is killed": (r"", r""),
}


class Unpicklable(Exception):
    """Value that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("the fault")
        self.held = lambda: None


def body(fault: str, folder: str, finish: bool = False) -> None:
    """Exchange something again and again; in the tenth round the fault strikes."""
    rank = dist.get_rank()
    one = torch.ones(1)
    for number in range(20):
        if number == 10:
            if rank == 1:
                strike(fault, Path(folder))
            elif "computes" in fault:
                endless()
        dist.all_reduce(one)
        one.fill_(1.0)
    if finish:
        dist.destroy_process_group()


def strike(fault: str, folder: Path) -> None:
    """Cause the fault."""
    if "loader" not in fault:
        struck(folder)
    if fault.startswith("rank raises what"):
        raise Unpicklable
    if fault.startswith("rank raises"):
        raise ValueError("the fault")
    if fault.startswith("rank exits"):
        os._exit(3)
    if fault.startswith("rank is killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.startswith("rank crashes"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault.startswith("loader"):
        for _ in DataLoader(Breaks(folder), num_workers=1):  # type: ignore[arg-type]
            pass
    endless()  # and, for the faults of the caller, until somebody ends it


def endless() -> None:
    """Compute without end."""
    while True:
        pass


class Breaks:
    """Dataset whose third sample kills the worker that makes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 3:
            struck(self._folder)
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def struck(folder: Path) -> None:
    """Write down the time at which the fault strikes."""
    (folder / "part").write_text(str(time.time()))
    (folder / "part").rename(folder / "struck")


# The tools: each runs `body` on two ranks, as its tutorial says.


def with_distwrap(fault: str, folder: str) -> None:
    from distwrap import distributed

    distributed(nprocs=NPROCS, timeout=COLLECTIVE)(body)(fault, folder)


def with_torchrun(fault: str, folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE))
    body(fault, folder, finish=True)


def with_fabric(fault: str, folder: str) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(start_method="spawn", timeout=timedelta(seconds=COLLECTIVE), process_group_backend="gloo")
    Fabric(accelerator="cpu", devices=NPROCS, strategy=strategy).launch(_in_fabric, fault, folder)


def _in_fabric(_: object, fault: str, folder: str) -> None:
    body(fault, folder, finish=True)


def with_accelerate(fault: str, folder: str) -> None:
    from accelerate import debug_launcher

    debug_launcher(_in_accelerate, args=(fault, folder), num_processes=NPROCS)


def _in_accelerate(fault: str, folder: str) -> None:
    from accelerate import Accelerator, InitProcessGroupKwargs

    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=COLLECTIVE))])
    body(fault, folder)


def with_torchrunx(fault: str, folder: str) -> None:
    from torchrunx import Launcher

    host = ["localhost"]
    Launcher(hostnames=host, workers_per_host=NPROCS, backend="gloo", worker_timeout=int(COLLECTIVE)).run(
        body, fault, folder
    )


TOOLS: dict[str, tuple[str, Callable[[str, str], None]]] = {
    "distwrap": ("distwrap", with_distwrap),
    "torchrun": ("torch", with_torchrun),
    "Fabric": ("lightning", with_fabric),
    "Accelerate": ("accelerate", with_accelerate),
    "torchrunx": ("torchrunx", with_torchrunx),
}


def measure(tool: str, fault: str) -> dict[str, object]:
    """Let a fault strike under a tool, and record what the caller sees and what is left behind."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        command = [sys.executable, os.path.abspath(__file__), "--inside", tool, fault, name]
        if tool == "torchrun":
            command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NPROCS}"]
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, cwd=name)
        note = folder / "struck"
        start = time.time()
        while not note.exists() and process.poll() is None and time.time() - start < 2 * PATIENCE:
            time.sleep(0.01)
        if fault in ("Ctrl-C", "caller is killed") and process.poll() is None:
            time.sleep(0.2)
            if fault == "Ctrl-C":
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            else:
                process.kill()
        moment = float(note.read_text()) if note.exists() else start
        try:
            process.wait(max(0.1, moment + PATIENCE - time.time()))
            seconds: float | None = max(0.0, time.time() - moment)
        except subprocess.TimeoutExpired:
            seconds = None
        left = _left_behind(time.time() + SETTLE) if seconds is not None else 0
        end_all(process)
        text = (folder / "output").read_text(errors="replace")
        who, what = FAULTS[fault]
        return {
            "tool": tool,
            "fault": fault,
            "seconds": seconds,
            "says why": bool(re.search(who, text) and re.search(what, text)),
            "left": left,
            "output": text[-4000:],
        }


def _left_behind(deadline: float) -> int:
    while True:
        alive = list(descendants(os.getpid()))
        if not alive or time.time() > deadline:
            return len(alive)
        time.sleep(0.05)


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End all processes that are left, also those that start meanwhile."""
    while alive := list(descendants(os.getpid())):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    process.wait()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants(pid: int) -> Iterator[int]:
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()):
                if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    yield child
                yield from descendants(child)
    except (FileNotFoundError, ProcessLookupError):
        return


def table(results: list[dict[str, object]]) -> str:
    """Lay the results out with a row a fault and a column a tool."""
    tools = list(dict.fromkeys(str(result["tool"]) for result in results))
    lines = ["| fault | " + " | ".join(tools) + " |", "|---" * (1 + len(tools)) + "|"]
    for fault in dict.fromkeys(str(result["fault"]) for result in results):
        row = []
        for tool in tools:
            result = next(r for r in results if (r["tool"], r["fault"]) == (tool, fault))
            if result["seconds"] is None:
                row.append(f"hangs (> {PATIENCE:g} s)")
                continue
            words = [f"{result['seconds']:.1f} s"]
            words += [] if result["says why"] else ["no cause"]
            words += [f"leaves {result['left']}"] if result["left"] else []
            row.append(", ".join(words))
        lines.append(f"| {fault} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        tool, fault, folder = options.inside
        TOOLS[tool][1](fault, folder)
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and hand that down
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a caller leaves behind becomes ours (Linux)
    missing = [tool for tool in options.tools if find_spec(TOOLS[tool][0]) is None]
    for tool in missing:
        print(f"{tool} is not installed, and left out.")
    results = []
    for fault in options.faults:
        for tool in options.tools:
            if tool not in missing:
                results.append(measure(tool, fault))
                shown = {key: value for key, value in results[-1].items() if key != "output"}
                print(shown, flush=True)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
