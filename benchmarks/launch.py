"""Time until ranks run: distwrap beside hand-written torch, and beside other launchers where installed.

Every launch does the same: start the ranks, form a gloo group, one all-reduce, return.

    python benchmarks/launch.py [--quick] [--json FILE] [--plot FILE.png] [--against CHECKOUT]
"""

from __future__ import annotations

import compileall
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from command_line import arguments, compare, left_out_of_quick
from contenders import Contender, first_launch, installed
from samples import Samples, in_turns
from table import Row, report

# each beside our launcher of its kind
PEERS = {
    "Fabric ddp_fork": "distwrap fork",
    "Accelerate debug_launcher": "distwrap fork",
    "Fabric ddp_spawn": "distwrap forkserver",
    "torchrunx": "distwrap forkserver",
}
QUICK_PEERS = ("Accelerate debug_launcher",)


def main() -> None:
    args = arguments(__doc__)
    if args.against:
        compare(__file__, args)
        return
    rounds, slow_rounds, fresh_rounds = (2, 1, 1) if args.short else (30, 7, 9)
    compile_as_pip_does()
    rows = [repeat_launch(nprocs, rounds, slow_rounds) for nprocs in ((2,) if args.short else (2, 4))]
    rows += [*first_launches(fresh_rounds), import_cost(fresh_rounds)]
    timed = QUICK_PEERS if args.quick else PEERS
    peers = [peer(theirs, ours, slow_rounds) for theirs, ours in PEERS.items() if theirs in timed]
    rows += [row for row in peers if isinstance(row, Row)]
    notes = [note for note in peers if isinstance(note, str)]
    notes += left_out_of_quick([theirs for theirs in PEERS if theirs not in timed])
    report("launch: ranks on this machine, gloo", rows, notes, args)


def repeat_launch(nprocs: int, rounds: int, slow_rounds: int) -> Row:
    """Time the second and later launches of a process: from the warm fork server, and by `mp.spawn`."""
    with ExitStack() as stack:
        ours, spawn = (
            _warm(stack, "distwrap forkserver", nprocs),
            _entered(stack, "torch.multiprocessing.spawn", nprocs),
        )
        taken = in_turns({"ours": ours.launch, "spawn": spawn.launch}, slow_rounds)
        more = in_turns({"ours": ours.launch}, rounds - slow_rounds)
    measured = Samples(taken["ours"].seconds + more["ours"].seconds)
    times = taken["spawn"].median / measured.median
    return Row(
        f"repeat launch, {nprocs} ranks: forkserver, mp.spawn",
        measured,
        taken["spawn"],
        "s",
        f"{times:.0f} times faster",
        "<= 0.15 s, >= 20 times",
        measured.median <= 0.15 and times >= 20,
    )


def first_launches(rounds: int) -> list[Row]:
    """Time the first launch of a fresh process: by the fork server, which must start, and by fork."""
    server = in_turns({"ours": lambda: first_launch("distwrap forkserver", 2), "import": _import_torch}, rounds)
    fork = in_turns(
        {"ours": lambda: first_launch("distwrap fork", 2), "raw": lambda: first_launch("raw os.fork", 2)}, rounds
    )
    server_ratio, fork_ratio = server["ours"].over(server["import"]), fork["ours"].over(fork["raw"])
    return [
        Row(
            "first launch, 2 ranks: forkserver, python -c 'import torch'",
            server["ours"],
            server["import"],
            "s",
            f"{server_ratio:.2f} times",
            "<= 1.2 times",
            server_ratio <= 1.2,
        ),
        Row(
            "first launch, 2 ranks: fork, raw os.fork",
            fork["ours"],
            fork["raw"],
            "s",
            f"{fork_ratio:.2f} times",
            "<= 1.5 times",
            fork_ratio <= 1.5,
        ),
    ]


def import_cost(rounds: int) -> Row:
    """Time `import distwrap` where torch is imported already."""
    code = "import torch, time; start = time.perf_counter(); import distwrap; print(time.perf_counter() - start)"

    def once() -> float:
        return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60).stdout)

    taken = Samples(in_turns({"ours": once}, rounds)["ours"].seconds)
    return Row(
        "import distwrap, after import torch",
        taken,
        None,
        "ms",
        f"{taken.median * 1e3:.0f} ms more",
        "<= 30 ms",
        taken.median <= 0.030,
    )


def peer(theirs: str, ours: str, rounds: int) -> Row | str:
    """Time another library's repeat launch beside ours; return a note where it is not installed, or fails."""
    if not installed(theirs):
        return f"{theirs}: not installed"
    with ExitStack() as stack:
        try:
            other = _entered(stack, theirs, 2)
            other.launch()
            taken = in_turns({"ours": _warm(stack, ours, 2).launch, "theirs": other.launch}, rounds)
        except RuntimeError as error:
            return f"{theirs}: failed ({str(error).strip().splitlines()[-1]})"
    times = taken["theirs"].median / taken["ours"].median
    what = f"repeat launch, 2 ranks: {ours.removeprefix('distwrap ')}, {theirs}"
    figure = f"{times:.1f} times faster" if times >= 1 else f"{1 / times:.1f} times slower"
    return Row(what, taken["ours"], taken["theirs"], "s", figure)


def compile_as_pip_does() -> None:
    """Write distwrap's byte code, as pip does when it installs: a checkout may have none, and torch has its own."""
    spec = find_spec("distwrap")
    assert spec is not None
    assert spec.origin is not None
    compileall.compile_dir(Path(spec.origin).parent, quiet=1)


def _warm(stack: ExitStack, way: str, nprocs: int) -> Contender:
    contender = _entered(stack, way, nprocs)
    contender.launch()
    time.sleep(0.5)  # the fork server uses its first idle moment to import what DDP needs later,
    contender.launch()  # and this waits until it has
    return contender


def _entered(stack: ExitStack, way: str, nprocs: int) -> Contender:
    contender = Contender(way, nprocs)
    stack.callback(contender.close)
    return contender


def _import_torch() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=60)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
