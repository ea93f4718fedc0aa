"""Run programs that train a divided model and break, and check what the caller sees and what is left behind.

python -m tests.faults.divided                                each strategy and fault, on each of two ranks
python -m tests.faults.divided --only fsdp "save alone"
python -m tests.faults.divided --times 100 --busy --jobs 2    each fault a hundred times, with all cores busy
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from functools import cache

from tests.faults.cells import LIMIT, TIMEOUT
from tests.faults.divided_cells import DividedCell, all_cells, expected
from tests.faults.one_cell import Seen, run
from tests.faults.run import burns, counts, options_of, results_of, summary_of

IMPORTED = (  # by whom ranks are forked from, and not by each of them
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "distwrap.checkpoint.sharded",
    "distwrap.strategies.fsdp.sharded",
    "distwrap.strategies.pipeline.strategy",
    "distwrap.strategies.zero",
    "tests.faults.divided_program",
)


def run_divided(cell: DividedCell, slack: float = 1.0) -> Seen:
    """Run a cell in forks of this process."""
    _prepare()
    from tests.faults.divided_program import main

    return run(cell, slack=slack, wanted=expected(cell), main=main)


@cache
def _prepare() -> None:
    for name in IMPORTED:
        importlib.import_module(name)


def main() -> int:
    """Run the cells, and print what is seen."""
    options = options_of(__doc__).parse_args()
    cells = list(all_cells())
    random.Random(0).shuffle(cells)  # so that what runs side by side, and what is done first, is a bit of everything
    results = results_of(cells, options, run_divided, ("fault",))
    results.sort(key=lambda seen: (seen.cell.fault, seen.cell.strategy))
    summary = summary_of(results)
    text = f"{counts(results, ('fault',))}\n\n{counts(results, ('strategy', 'fault'))}"
    print(text)
    print(summary)
    if options.write:
        times = f"each fault {options.times} times" if options.times else "each once"
        load = ", kept busy besides" * burns(options)
        head = HEAD.format(times=times, load=load, jobs=options.jobs, cores=os.cpu_count())
        options.write.write_text(f"{head}\n\n{summary}\n\n{text}\n")
    return any(seen.wrong for seen in results)


HEAD = f"""# Faults in divided models

Written by `python -m tests.faults.divided`: programs that train a divided model and break, {{times}}, {{jobs}} programs
at a time on {{cores}} cores{{load}}, under each strategy and on each of the first two ranks in turns. Right is the
exception, the rank and the first cause that `tests/faults/divided_cells.py` expects, nothing left behind, and after a
kill in a save or load a checkpoint that is whole, within {LIMIT:g} s at most. Late is right but for the time; wrong is
anything else, a hang included. What only the time limit of collectives ends has one of {TIMEOUT:g} s, or 10 s under
--busy."""


if __name__ == "__main__":
    sys.exit(main())
