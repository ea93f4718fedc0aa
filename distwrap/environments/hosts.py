"""Host of rank 0: the first in the batch system's list."""

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
    names = []
    try:
        if not re.fullmatch(f"{_NAME}(?:,{_NAME})*", hostlist):
            raise ValueError(hostlist)
        for part in re.findall(_NAME, hostlist):
            pieces = _BRACKETS.split(part)  # text, range, text, range, …, text
            choices = [_numbers(piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
            names += ["".join(choice).strip() for choice in product(*choices)]
    except ValueError:
        raise PlacementError(f"{hostlist!r} is not a list of hosts as Slurm writes it, such as n[01-03,7].") from None
    return names


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for item in ranges.split(","):
        first, dash, last = item.strip().partition("-")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last if dash else first) + 1)]
    return numbers


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's short form of the number of tasks on each node.

    Example:
        >>> tasks_per_node("4(x2),3")
        [4, 4, 3]
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise PlacementError(f"{text!r} does not say how many tasks each node has, as Slurm's 4(x2),3 does.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def nodelist_of_job(env: Mapping[str, str]) -> str | None:
    """Return the nodes of a Slurm job, in Slurm's short form."""
    return env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")


def first_of_allocation(env: Mapping[str, str]) -> str | None:
    """Return the first host of the batch system that holds the nodes, for an MPI launcher that names none."""
    if "AZ_BATCH_MASTER_NODE" in env:  # AzureML: "host:port", the port being for ssh
        return env["AZ_BATCH_MASTER_NODE"].partition(":")[0]
    if "AZ_BATCHAI_MPI_MASTER_NODE" in env:
        return env["AZ_BATCHAI_MPI_MASTER_NODE"]
    nodelist = nodelist_of_job(env)
    if nodelist:
        return expand(nodelist)[0]
    lines = _read_lines(env.get("PBS_NODEFILE"))
    return lines[0] if lines else first_of_lsf(env)


def first_of_lsf(env: Mapping[str, str]) -> str | None:
    """Return the first host of an LSF job that runs tasks; the very first one runs the job script and no tasks."""
    listed = _read_lines(env.get("LSB_DJOB_RANKFILE")) or env.get("LSB_MCPU_HOSTS", "").split()[::2]
    unique = list(dict.fromkeys(listed))
    return next(iter(unique[1:] or unique), None)


def _read_lines(path: str | None) -> list[str]:
    try:
        return Path(path).read_text().split() if path else []
    except OSError:
        return []
