"""The doctor's findings in words, as JSON and as a picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distwrap.cli.facts import VISIBLE_BY, Facts
from distwrap.cli.measure import AllReduceTime, Measured
from distwrap.comm.advice import Advice

# Variables that differ from rank to rank by design.
_OF_A_RANK = ("DISTWRAP_", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", *VISIBLE_BY)


@dataclass
class DoctorReport:
    """All findings.

    Attributes:
        facts: the view of this process, or of rank 0.
        measured: the results of the real test, where it was made.
        problems: what is wrong.
        remarks: what is worth knowing.
        seconds: how long it took.
    """

    facts: Facts
    measured: Measured | None
    problems: list[str]
    remarks: list[str]
    seconds: float

    def text(self) -> str:
        """Describe all findings."""
        parts = [describe_facts(self.facts)]
        if self.measured is not None:
            parts.append(describe_measured(self.measured, self.seconds))
            if self.measured.advice is not None:
                parts.append(describe_advice(self.measured.advice))
        lines = [f"Problem: {text}" for text in self.problems] + [f"Remark: {text}" for text in self.remarks]
        lines.append(f"{len(self.problems)} problem(s) found." if self.problems else "No problems found.")
        return "\n\n".join([*parts, "\n".join(lines)])

    def json(self) -> str:
        """Write all findings as one JSON object."""
        found: dict[str, Any] = {"problems": self.problems, "remarks": self.remarks}
        found |= {"seconds": round(self.seconds, 3), "here": asdict(self.facts)}
        if self.measured is not None:
            ranks = len(self.measured.facts)
            if self.measured.advice is not None:
                found["comm"] = asdict(self.measured.advice)
            found["ranks"] = [asdict(each) for each in self.measured.facts]
            found["all_reduce"] = [
                {**asdict(each), "bus_bytes_per_second": each.bus_bandwidth(ranks)}
                for each in self.measured.all_reduces
            ]
        return json.dumps(found, indent=1)


def describe_facts(facts: Facts) -> str:
    """Describe one process's view, and what would be decided."""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    yes = [name for name, said in facts.launchers.items() if said.startswith("yes")]
    lines = [f"{facts.host}: {versions}", "", f"Who started this process: {yes[0] if yes else 'no launcher'}"]
    lines += [f"  {name:<10} {said}" for name, said in facts.launchers.items()]
    lines += ["", "What @distributed does here"]
    lines += [f"  {name:<14} {said}" for name, said in facts.decided.items()]
    if facts.variables:
        lines += ["", "Variables that matter"]
        lines += [f"  {name}={value}" for name, value in facts.variables.items()]
    return "\n".join(lines)


def describe_measured(measured: Measured, seconds: float) -> str:
    """Describe the results of the real test."""
    ranks = len(measured.facts)
    lines = [f"Real test: {ranks} rank(s) started, met and measured in {seconds:.1f} s"]
    hosts = sorted({facts.host for facts in measured.facts})
    lines.append(f"  on {', '.join(hosts)}; {_devices(measured.facts)}")
    lines += [f"  {_device(each)}" for each in measured.facts if each.device]
    if not measured.all_reduces:
        lines.append("  one rank has no exchange to measure; --nprocs 2 measures one")
    else:
        lines.append("  all-reduce      time      bandwidth of the link")
        lines += [f"  {_row(each, ranks)}" for each in measured.all_reduces]
    return "\n".join(lines)


def describe_advice(advice: Advice) -> str:
    """Describe the step under each algorithm of exchange, and recommend one."""
    lines = [
        f"A step of a model with {advice.weights / 1e6:.3g} million weights, {advice.ranks} ranks, "
        f"{advice.bandwidth * 8 / 1e6:.3g} Mbit/s from each",
        f"  compute alone {advice.compute * 1e3:.1f} ms",
        "  comm                              exchange        step    against DDP",
    ]
    first = advice.predictions[0]
    for row in advice.predictions:
        faster = first.step / row.step
        lines.append(f"  {row.comm:<30} {row.exchange * 1e3:>8.1f} ms {row.step * 1e3:>8.1f} ms {faster:>8.2f} times")
    return "\n".join([*lines, f"Recommended: comm={advice.choice!r}: {advice.reason}."])


def disagreements(facts: Sequence[Facts]) -> list[str]:
    """Return a sentence for each value that should be the same on all nodes, and differs from that of rank 0's node.

    Example:
        >>> a, b = (Facts(host, versions={"torch": v}) for host, v in (("n1", "2.13"), ("n2", "2.12")))
        >>> disagreements([a, b])
        ['n2 has torch 2.12, and n1, where rank 0 is, 2.13']
    """
    first, found = facts[0], {}
    rank_zeros = f"and {first.host}, where rank 0 is,"
    for other in facts[1:]:
        for kind in ("versions", "variables"):
            expected, seen = getattr(first, kind), getattr(other, kind)
            for name in sorted({*expected, *seen}):
                value, theirs = seen.get(name, "not set"), expected.get(name, "not set")
                if value != theirs and not name.startswith(_OF_A_RANK):
                    found[other.host, name] = f"{other.host} has {name} {value}, {rank_zeros} {theirs}"
        backend, theirs = other.decided.get("backend"), first.decided.get("backend")
        if backend != theirs:
            found[other.host, "backend"] = f"{other.host} uses {backend}, {rank_zeros} {theirs}"
    return list(found.values())


def _devices(facts: Sequence[Facts]) -> str:
    kinds = sorted({each.decided.get("device", "cpu").partition(":")[0] for each in facts})
    if kinds == ["cpu"]:
        return "all on the CPU"
    named = [each.device[3] for each in facts if each.device and each.device[3]]
    shared = "each rank on a device of its own" if len(set(named)) == len(named) else "some ranks SHARE a device"
    return f"{', '.join(kinds)}, {shared}"


def _device(facts: Facts) -> str:
    assert facts.device is not None
    device, model, memory, name = facts.device
    size = "" if memory is None else f"{memory / 2**30:.1f} GiB"
    return f"  rank {facts.rank:<4} {device:<12} {model:<24} {size:>10}  {name or ''}".rstrip()


def _row(each: AllReduceTime, ranks: int) -> str:
    power = 2 if each.size >= 1 << 20 else 1
    size = f"{each.size >> 10 * power} {'KM'[power - 1]}iB"
    return f"{size:>8}  {each.seconds * 1e6:>9.0f} µs  {each.bus_bandwidth(ranks) / 1e9:>8.2f} GB/s"


def plot(measured: Measured, path: str) -> None:
    """Draw time and bandwidth by size.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    ranks = len(measured.facts)
    sizes = [each.size for each in measured.all_reduces]
    figure = Figure(figsize=(9, 4), layout="constrained")
    time_axis, link_axis = figure.subplots(1, 2)
    time_axis.loglog(sizes, [each.seconds * 1e6 for each in measured.all_reduces], "o-")
    time_axis.set(xlabel="bytes", ylabel="µs", title=f"all-reduce over {ranks} ranks")
    link_axis.semilogx(sizes, [each.bus_bandwidth(ranks) / 1e9 for each in measured.all_reduces], "o-")
    link_axis.set(xlabel="bytes", ylabel="GB/s", title="bandwidth of the link", ylim=(0, None))
    for axis in (time_axis, link_axis):
        axis.grid(alpha=0.3)
    figure.savefig(Path(path), dpi=120)
