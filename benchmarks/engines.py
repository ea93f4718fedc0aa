"""A step, the memory and the start of each engine behind distwrap, beside the engine's own script written by hand.

A model of 97.9 million parameters, AdamW, float32, on the CPU over gloo, on two ranks. Two ways at a time are alive,
and take their steps in turns; then they are started in turns, from the launch of the ranks' processes to the end of
their first step. Memory is that of a process above what it took before the model was made and the engine imported.

DeepSpeed and Horovod have environments of their own, which `make nightly` makes: `.venv-deepspeed` and
`.venv-horovod` beside the project are found, others by `--python deepspeed=PATH` or in `DEEPSPEED_PYTHON`.

    python benchmarks/engines.py [--quick] [--python ENGINE=PATH] [--json FILE]     # half an hour, 10 GB of memory
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from asked_ranks import Memory, Ranks, most, ratio_row
from command_line import arguments, compare, left_out_of_quick
from samples import Samples, in_turns
from table import Row, report

RANKS = 2
GOAL = 1.03  # times the step of the engine's own script
PAIRS = {  # distwrap's way, and the engine's own
    "distwrap ddp": "torch ddp",
    "distwrap fsdp": "torch fsdp2",
    "distwrap zero1": "torch zero",
    **{f"distwrap deepspeed {stage}": f"deepspeed.initialize {stage}" for stage in (1, 2, 3)},
    "distwrap horovod": "horovod.torch",
}
ENGINES = ("deepspeed", "horovod")  # in environments of their own
QUICK_PAIRS = ("distwrap fsdp", "distwrap deepspeed 2", "distwrap horovod")


def main() -> None:
    python = {"action": "append", "default": [], "metavar": "ENGINE=PATH", "help": "the interpreter that has an engine"}
    some = {"nargs": "+", "metavar": "WAY", "help": "some of ours, as 'distwrap ddp'"}
    rounds = {"type": int, "default": 24, "help": "steps of each way; by default 24"}
    starts = {"type": int, "default": 4, "help": "starts of each way; by default 4"}
    args = arguments(__doc__, python=python, only=some, rounds=rounds, starts=starts)
    if args.against:
        compare(__file__, args)
        return
    size, times = ("quick", (2, 0 if args.quick else 1)) if args.short else ("full", (args.rounds, args.starts))
    only = args.only or (QUICK_PAIRS if args.quick else PAIRS)
    pythons, reasons = interpreters(args)
    rows: list[Row] = []
    memory: dict[str, list[Memory]] = {}
    left_out = []
    for ours, theirs in PAIRS.items():
        if ours not in only:
            continue
        engine = next((each for each in ENGINES if each in ours), "")
        if engine in reasons:
            left_out.append(f"{ours}: left out, {reasons[engine]}")
            continue
        found, more = measure((ours, theirs), size, times, pythons.get(engine, sys.executable))
        memory |= found
        rows += more
    if not args.only:
        left_out += left_out_of_quick([ours for ours in PAIRS if ours not in only])
    notes = [memory_of(memory), *left_out]
    report("engines: a step and a start beside the engine's own script, and memory a rank", rows, notes, args)


def interpreters(args: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Return the interpreter of each engine that has one, and why the others have none."""
    named = dict(each.split("=", 1) for each in args.python)
    root = Path(__file__).resolve().parent.parent
    found, reasons = {}, {}
    for engine in ENGINES:
        usual = root / f".venv-{engine}" / "bin" / "python"
        python = named.get(engine) or os.environ.get(f"{engine.upper()}_PYTHON") or str(usual)
        if not Path(python).exists():
            reasons[engine] = f"for there is no {python}: make nightly ROWS={engine}, or --python {engine}=PATH"
        elif subprocess.run(
            [python, "-c", f"import importlib.util as u; exit(not u.find_spec('{engine}'))"]
        ).returncode:
            reasons[engine] = f"for {python} has no {engine}"
        else:
            found[engine] = python
    return found, reasons


def measure(
    pair: tuple[str, str], size: str, times: tuple[int, int], python: str
) -> tuple[dict[str, list[Memory]], list[Row]]:
    """Return the memory of two ways, and the rows of their steps and starts, of which there are so many.

    Without starts of their own, those of the ranks that take the steps are told.
    """

    def started(way: str, ends: ExitStack) -> Ranks:
        return ends.enter_context(closing(Ranks(way, RANKS, size, script="engines_ranks.py", python=python)))

    def start(way: str) -> float:
        with ExitStack() as ends:
            return started(way, ends).wait()

    with ExitStack() as ends:
        groups, starts = {}, {}
        for way in pair:
            groups[way] = started(way, ends)
            starts[way] = Samples([groups[way].wait()])
        ours, theirs = in_turns({way: group.step for way, group in groups.items()}, times[0]).values()
        memory: dict[str, list[Memory]] = {way: group.ask("memory") for way, group in groups.items()}
    name = ", ".join(pair)
    rows = [ratio_row(f"step: {name}", ours, theirs, "ms", GOAL)]
    if times[1]:
        starts = in_turns({way: partial(start, way) for way in pair}, times[1])
    ours, theirs = starts.values()
    return memory, [*rows, ratio_row(f"start: {name}", ours, theirs, "s", None)]


def memory_of(memory: dict[str, list[Memory]]) -> str:
    """Return a line a way: the most that a rank takes, in megabytes."""
    lines = [f"memory a rank on {RANKS} ranks, in MB above an idle process"]
    for way, each in memory.items():
        taken = most(each)
        lines.append(f"  {way:22} steady {taken['steady']:5.0f}, peak {taken['peak']:5.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
