"""Say for people what the doctor found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distwrap.cli.facts import Facts
from distwrap.cli.measure import Exchange, Measured
from distwrap.comm.advice import Advice


def of_facts(facts: Facts) -> str:
    """Describe what one process sees, and what would be decided."""
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


def of_measured(measured: Measured, seconds: float) -> str:
    """Describe how the real test went."""
    ranks = len(measured.facts)
    lines = [f"Real test: {ranks} rank(s) started, met and measured in {seconds:.1f} s"]
    hosts = sorted({facts.host for facts in measured.facts})
    lines.append(f"  on {', '.join(hosts)}; {_devices(measured.facts)}")
    if not measured.exchanges:
        lines.append("  one rank: no exchange to measure (--nprocs 2 measures one)")
    else:
        lines.append("  all-reduce      time      bandwidth of the link")
        lines += [f"  {_row(each, ranks)}" for each in measured.exchanges]
    return "\n".join(lines)


def of_advice(advice: Advice) -> str:
    """Describe what each algorithm of exchange would make of a step, and which one to take."""
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


def of_problems(problems: Sequence[str], remarks: Sequence[str]) -> str:
    """List what is wrong, and what is worth knowing."""
    lines = [f"Problem: {text}" for text in problems] + [f"Remark: {text}" for text in remarks]
    return "\n".join([*lines, f"{len(problems)} problem(s) found." if problems else "No problems found."])


def disagreements(facts: Sequence[Facts]) -> list[str]:
    """Say which machines differ from that of rank 0 in what should be the same everywhere.

    Example:
        >>> a, b = (Facts(host, versions={"torch": v}) for host, v in (("n1", "2.13"), ("n2", "2.12")))
        >>> disagreements([a, b])
        ['n2 has torch 2.12, and n1, where rank 0 is, 2.13']
    """
    first, found = facts[0], {}
    for other in facts[1:]:
        for what in ("versions", "variables"):
            mine, theirs = getattr(first, what), getattr(other, what)
            for name in sorted({*mine, *theirs}):
                if mine.get(name) != theirs.get(name) and not name.startswith(_OF_A_RANK):
                    found[other.host, name] = (
                        f"{other.host} has {name} {theirs.get(name, 'not set')}, and {first.host}, where rank 0 is, "
                        f"{mine.get(name, 'not set')}"
                    )
        if other.decided.get("backend") != first.decided.get("backend"):
            found[other.host, "backend"] = (
                f"{other.host} uses {other.decided.get('backend')}, and {first.host}, where rank 0 is, "
                f"{first.decided.get('backend')}"
            )
    return list(found.values())


_OF_A_RANK = ("DISTWRAP_", "CUDA_VISIBLE", "HIP_VISIBLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def _devices(facts: Sequence[Facts]) -> str:
    kinds = sorted({each.decided.get("device", "cpu").partition(":")[0] for each in facts})
    if kinds == ["cpu"]:
        return "all on the CPU"
    named = [each.device for each in facts if each.device]
    return f"{', '.join(kinds)}, {'each on a device of its own' if len(set(named)) == len(named) else 'some SHARE one'}"


def _row(each: Exchange, ranks: int) -> str:
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
    sizes = [each.size for each in measured.exchanges]
    figure = Figure(figsize=(9, 4), layout="constrained")
    time_axis, link_axis = figure.subplots(1, 2)
    time_axis.loglog(sizes, [each.seconds * 1e6 for each in measured.exchanges], "o-")
    time_axis.set(xlabel="bytes", ylabel="µs", title=f"all-reduce over {ranks} ranks")
    link_axis.semilogx(sizes, [each.bus_bandwidth(ranks) / 1e9 for each in measured.exchanges], "o-")
    link_axis.set(xlabel="bytes", ylabel="GB/s", title="bandwidth of the link", ylim=(0, None))
    for axis in (time_axis, link_axis):
        axis.grid(alpha=0.3)
    figure.savefig(Path(path), dpi=120)
