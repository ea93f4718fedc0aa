"""Memory a rank and time a step of divided models, beside hand-written torch and Accelerate.

A model of 97.9 million parameters, AdamW, float32, on the CPU over gloo, on 2 and 4 ranks. Two ways at a time are
alive, and take their steps in turns. Memory is that of a process above what it took before the model was made.
Accelerate leaves its FSDP out on the CPU and trains DDP, without a word; its line shows it, and its steps are not
compared, nor are those of ways that train one batch on all ranks: of tensor parallelism and pipelines.

    python benchmarks/sharded.py [--quick] [--json FILE] [--plot FILE.png]     # twenty minutes, 18 GB of memory
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from importlib.util import find_spec

from asked_ranks import MEGABYTE, Memory, Ranks, most, ratio_row
from command_line import arguments, compare, left_out_of_quick
from samples import in_turns
from sharded_ranks import SIZES, WAYS
from table import Row, report

PAIRS: dict[tuple[str, str], float | None] = {  # and the goal of the first one's step over the second one's
    ("distwrap ddp", "torch ddp"): None,
    ("distwrap zero1", "torch zero"): None,
    ("distwrap fsdp", "torch fsdp2"): 1.02,
    ("distwrap zero1", "distwrap ddp"): 1.05,
}
QUICK_PAIR = ("distwrap fsdp", "torch fsdp2")


def main() -> None:
    args = arguments(__doc__)
    if args.against:
        compare(__file__, args)
        return
    size, counts, rounds = ("quick", (2,), 3) if args.short else ("full", (2, 4), 15)
    pairs = {pair: goal for pair, goal in PAIRS.items() if pair == QUICK_PAIR or not args.quick}
    plot, args.plot = args.plot, None
    rows: list[Row] = []
    figures: dict[int, dict[str, list[Memory]]] = {}
    notes = []
    for ranks in counts:
        figures[ranks], more = measure(ranks, size, rounds, pairs)
        rows += more
        notes.append(memory_of(figures[ranks], ranks, size))
    if not find_spec("accelerate"):
        notes.append("accelerate fsdp2: not installed")
    notes += left_out_of_quick([" beside ".join(pair) for pair in PAIRS if pair not in pairs])
    report("sharded: a step of AdamW, and memory a rank", rows, notes, args)
    if plot:
        draw(figures, plot)


def measure(
    ranks: int, size: str, rounds: int, pairs: dict[tuple[str, str], float | None]
) -> tuple[dict[str, list[Memory]], list[Row]]:
    """Return the memory of each way, and the rows of their steps; quick ways stay for the next pair."""
    memory: dict[str, list[Memory]] = {}
    rows = []
    with ExitStack() as ends:
        groups: dict[str, Ranks] = {}
        for pair, goal in pairs.items():
            new = {way: ends.enter_context(closing(Ranks(way, ranks, size))) for way in pair if way not in groups}
            for group in new.values():
                group.wait()
            groups |= new
            steps: dict[str, Callable[[], float]] = {way: groups[way].step for way in pair}
            ours, theirs = in_turns(steps, rounds).values()
            memory |= {way: memory_after_steps(way, groups[way]) for way in pair if way not in memory}
            rows.append(ratio_row(f"step: {pair[0]}, {pair[1]}, {ranks} ranks", ours, theirs, "ms", goal))
            if size != "quick":
                ends.close()
                groups.clear()
    for way in WAYS if size != "quick" else ():
        if way in memory or not (way.startswith("distwrap") or find_spec("accelerate")):
            continue
        with closing(Ranks(way, ranks, size)) as group:
            group.wait()
            for _ in range(rounds):
                group.step()
            memory[way] = memory_after_steps(way, group)
    return {way: memory[way] for way in WAYS if way in memory}, rows


def memory_after_steps(way: str, group: Ranks) -> list[Memory]:
    memory: list[Memory] = group.ask("memory")
    peaks = group.ask("save") if way == "distwrap fsdp" else [0] * len(memory)
    return [each | {"save": peak} for each, peak in zip(memory, peaks, strict=True)]


def memory_of(memory: dict[str, list[Memory]], ranks: int, size: str) -> str:
    """Return a line a way: the most that a rank takes, in megabytes."""
    width, blocks, words = SIZES[size]
    share = 16 * (blocks * (12 * width**2 + 13 * width) + (words + 2) * width) / ranks / MEGABYTE
    largest = 4 * width * max(words, 4 * width) / MEGABYTE
    lines = [f"memory a rank on {ranks} ranks, in MB; 16 bytes a parameter / ranks are {share:.0f}, the goal of fsdp"]
    lines[0] += f" 1.15 times that, of a full checkpoint two tensors more: {2 * largest:.0f}"
    for way, each in memory.items():
        taken = most(each)
        line = f"  {way:17} weights, gradients, state {taken['held']:5.0f} ({taken['held'] / share:.2f}); "
        line += f"steady {taken['steady']:5.0f}, peak {taken['peak']:5.0f}"
        lines.append(line + (f"; a full checkpoint {taken['save']:.0f} more" if taken["save"] else ""))
    return "\n".join(lines)


def draw(figures: dict[int, dict[str, list[Memory]]], path: str) -> None:
    """Draw the memory of a rank against the number of ranks, a line a way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for way in next(iter(figures.values())):
        heights = [max(rank["peak"] for rank in of_ways[way]) / MEGABYTE for of_ways in figures.values()]
        style = "-" if way.startswith("distwrap") else "--"
        axes.plot(list(figures), heights, style, marker="o", label=way)
    axes.set_xticks(list(figures))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("peak memory of a rank in training, MB above an idle process")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
