"""Which machine has rank 0: the first of the list that the batch system gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from distwrap.errors import PlacementError

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_NAME = r"(?:[^,\[\]]|\[[^\[\]]*\])+"  # a comma between brackets is part of a name


def expand(hostlist: str) -> list[str]:
    """Expand Slurm's short form of a list of hosts.

    Raises:
        PlacementError: it is not in that form.

    Example:
        >>> expand("n[01-03,7]-ib,login")
        ['n01-ib', 'n02-ib', 'n03-ib', 'n7-ib', 'login']

    See https://slurm.schedmd.com/scontrol.html, "show hostnames".
    """
    if not re.fullmatch(f"{_NAME}(?:,{_NAME})*", hostlist):
        raise PlacementError(f"{hostlist!r} is no list of hosts in Slurm's form, as n[01-03,7].")
    names = []
    for part in re.findall(_NAME, hostlist):
        pieces = _BRACKETS.split(part)  # text, range, text, range, …, text
        choices = [_numbers(piece, hostlist) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        names += ["".join(choice).strip() for choice in product(*choices)]
    return names


def _numbers(ranges: str, hostlist: str) -> list[str]:
    numbers = []
    for item in ranges.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise PlacementError(f"{hostlist!r} is no list of hosts in Slurm's form, as n[01-03,7].")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return numbers


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's short form of how many tasks each node has.

    Example:
        >>> tasks_per_node("4(x2),3")
        [4, 4, 3]
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise PlacementError(f"{text!r} does not say how many tasks each node has, as 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def of_allocation(env: Mapping[str, str]) -> str | None:
    """Find the first host of whatever batch system holds the machines, for an MPI launcher that says none."""
    if "AZ_BATCH_MASTER_NODE" in env:  # AzureML: "host:port", the port being for ssh
        return env["AZ_BATCH_MASTER_NODE"].partition(":")[0]
    if "AZ_BATCHAI_MPI_MASTER_NODE" in env:
        return env["AZ_BATCHAI_MPI_MASTER_NODE"]
    nodelist = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if nodelist:
        return expand(nodelist)[0]
    lines = _lines(env.get("PBS_NODEFILE"))
    return lines[0] if lines else of_lsf(env)


def of_lsf(env: Mapping[str, str]) -> str | None:
    """Find the first host of an LSF job that runs tasks; the very first is where the job script runs, with none."""
    listed = _lines(env.get("LSB_DJOB_RANKFILE")) or env.get("LSB_MCPU_HOSTS", "").split()[::2]
    unique = list(dict.fromkeys(listed))
    return next(iter(unique[1:] or unique), None)


def _lines(path: str | None) -> list[str]:
    try:
        return Path(path).read_text().split() if path else []
    except OSError:
        return []
