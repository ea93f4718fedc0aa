"""Run work for a checkpoint on some ranks, and tell all ranks whether it succeeded."""

import json
import re
import socket
from collections.abc import Callable, Sequence

from distwrap.errors import CheckpointError, CollectiveError
from distwrap.group.collective_guard import CollectiveGuard
from distwrap.group.failures import is_secondary
from distwrap.group.wait_for_rank import share_result
from distwrap.group.world import current_world
from distwrap.supervision.activity import Activity

UNTOUCHED = ". What was there before is untouched."


def do_on_ranks(work: Callable[[], object], what: str, name: str, workers: Sequence[int] = (0,)) -> None:
    """Run some work on some ranks, and raise the failure of any of them on every rank.

    If only some ranks call, as in `rank_zero_only`, the others do not learn of a failure.

    Args:
        work: writes something.
        what: a description of it, for the error.
        name: a name of the work, equal on all ranks. Ranks meet in calls with the same line and name.
        workers: the ranks that run it.

    Raises:
        CheckpointError: the work failed, with rank and host; or this rank's name contains its rank.
    """
    rank, host = current_world().placement.rank, socket.gethostname()
    activity = current_world().part(Activity)
    activity.record(name)
    problem: str = ""
    cause: BaseException | None = None
    if rank in workers:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - all ranks raise it
            problem = problem_in_words(error)
            cause = error
    for worker in workers:
        its_host, its_problem, follows = host, problem, cause is not None and is_secondary(cause)
        if not current_world().part(CollectiveGuard).function:
            mine = json.dumps([name, host, problem, follows]).encode() if rank == worker else None
            its_name = ""
            while its_name != name:  # skips saves of that rank alone, or to another path
                its_name, its_host, its_problem, follows = _told_by(worker, mine, name, activity.site, its_name)
                if its_name != name:
                    _refuse_own_name(rank, name, worker, its_name)
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        if its_problem:
            failure = CheckpointError(
                f"{what} was not written by rank {worker} on {its_host}: {its_problem}{UNTOUCHED}"
            )
            failure.is_secondary = follows
            raise failure from (cause if rank == worker else None)


def first_problem(own: Exception | None, gather: Callable[[str], list[str]]) -> CheckpointError | None:
    """Return the failure of some rank on every rank; secondary failures come last.

    Args:
        own: the failure of this rank, or ``None``.
        gather: returns the texts of all ranks.
    """
    rank, line = current_world().placement.rank, ""
    if own is not None:
        line = f"{is_secondary(own):d}rank {rank} on {socket.gethostname()}: {problem_in_words(own)}"
    told = [text for text in gather(line) if text]
    if not told:
        return None
    first = min(told, key=lambda text: text[0])
    failure = CheckpointError(first[1:])
    failure.is_secondary = first[0] == "1"
    return failure


def problem_in_words(error: BaseException) -> str:
    """Return a failure as a part of the message that tells where it was."""
    words = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return words.removesuffix(UNTOUCHED)


def _told_by(worker: int, mine: bytes | None, name: str, site: str, before: str) -> tuple[str, str, str, bool]:
    """Return a rank's report on its work: name, host, problem, and whether that is a secondary failure.

    Args:
        worker: the rank.
        mine: this rank's own report, if it is the worker.
        name: the name of the work on this rank.
        site: the line of the call.
        before: another name that the worker reported there before, for the error and the hang report.

    Raises:
        CheckpointError: the worker has left without reaching this line.
    """
    waits_for = f"{name} (rank {worker} did {before!r} there)" if before else name
    try:
        name, host, problem, follows = json.loads(share_result(waits_for, worker, mine, turn=f"save at {site}"))
        return name, host, problem, follows
    except CollectiveError as error:
        why = "with the same path" if before else f"which rank {worker} did not reach"
        raise CheckpointError(
            f"{waits_for!r} at {site}: {error} All ranks must call it from one line, {why}."
        ) from error


def _refuse_own_name(rank: int, name: str, worker: int, its_name: str) -> None:
    """Raise an error if two names differ only by the ranks, since each rank means to write its own file."""
    mine, its = (re.split(r"(\d+)", each) for each in (name, its_name))
    differ = [pair for pair in zip(mine, its, strict=False) if pair[0] != pair[1]]
    if len(mine) == len(its) and all(one.isdigit() and (int(one), int(two)) == (rank, worker) for one, two in differ):
        raise CheckpointError(
            f"rank {rank} called {name!r}, and rank {worker} {its_name!r}. Only rank {worker} writes, for all ranks, "
            f"so all must give the same name. For a file of each rank's own use torch.save(), or else io='sharded'."
        )
