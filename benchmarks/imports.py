"""What `import distwrap` takes beside `import torch` alone, and what the first use of its main functions takes.

python benchmarks/imports.py [--quick] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable

from command_line import arguments, compare
from samples import Samples, in_turns
from table import Row, report

GOAL = 0.020
MAIN = "from distwrap import distributed, wrap_model, shard_loader, save"
# Garbage collections are counted, since a full one takes a tenth of a second with all that torch has imported.
PROGRAM = """
import gc, time
full = []
start = time.perf_counter()
import torch
done = time.perf_counter()
gc.callbacks.append(lambda phase, info: full.append(1) if phase == "stop" and info["generation"] == 2 else None)
begun = time.perf_counter()
{code}
print(time.perf_counter() - begun, done - start, len(full))
"""


def fresh(code: str, of_torch: list[float], collections: list[int]) -> Callable[[], float]:
    """Return a way to run an import in a fresh interpreter that has imported torch; it notes torch's time too."""

    def run() -> float:
        command = [sys.executable, "-c", PROGRAM.format(code=code)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        seconds, torch, full = done.stdout.split()
        of_torch.append(float(torch))
        collections.append(int(full))
        return float(seconds)

    return run


def main() -> None:
    """Time the imports in turns."""
    args = arguments(__doc__)
    if args.against:
        compare(__file__, args)
        return
    of_torch: dict[str, list[float]] = {name: [] for name in ("import distwrap", MAIN)}
    collections: dict[str, list[int]] = {name: [] for name in of_torch}
    ways = {name: fresh(name, of_torch[name], collections[name]) for name in of_torch}
    for way in ways.values():
        way()  # writes the byte code, as pip does
    taken = in_turns(ways, 1 if args.short else 25)
    rows = []
    for name, ours in taken.items():
        judged = name == "import distwrap"
        figure = f"{1e3 * ours.median:.1f} ms over torch, {statistics.mean(collections[name]):.1f} full collections"
        goal = (f"<= {1e3 * GOAL:g} ms over torch", ours.median <= GOAL) if judged else ("", None)
        rows.append(Row(f"{name} | import torch", ours, Samples(of_torch[name][1:]), "ms", figure, *goal))
    report("Imports in a fresh interpreter, after import torch", rows, [], args)


if __name__ == "__main__":
    main()
