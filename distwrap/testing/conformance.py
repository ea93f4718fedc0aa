"""`check_strategy`: prove that a strategy does all that the helpers of a hand-written loop ask of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Literal

from distwrap.checks import AT_LEAST_ONE
from distwrap.errors import ConformanceError, OptionError
from distwrap.options import Options
from distwrap.registry import strategies
from distwrap.strategies import Strategy
from distwrap.testing.behaviours import BEHAVIOURS
from distwrap.testing.on_ranks import Verdict, perform, verdicts, words_of_end
from distwrap.testing.ranks import run_with
from distwrap.wording import named_ranks, unknown_name

# Seconds that a rank waits for another, which goes on with the next behaviour only where all have ended this one.
_LIMIT = 20.0


def check_strategy(
    strategy: str | Strategy,
    nprocs: int = 2,
    *,
    only: Collection[str] | None = None,
    refuses: Collection[str] = (),
    timeout: float = 120,
) -> tuple[tuple[str, str], ...]:
    """Run the conformance suite: each behaviour on real ranks, and its numbers against one process in plain torch.

    A behaviour is one thing that a hand-written loop does: it trains by AdamW, clips, accumulates, saves and resumes,
    evaluates uneven batches, copies the model. All of them run in one launch, on small nets of blocks that a strategy
    can divide. What a strategy cannot do it must refuse by name, with a `DistwrapError`, and never by a hang or a wrong
    number.

    Args:
        strategy: a name out of `available_strategies`, or a `Strategy`, which must be picklable.
        nprocs: how many ranks.
        only: names of the behaviours to run; by default all.
        refuses: names of the behaviours that this strategy refuses. It must: one that passes is reported as well.
        timeout: seconds for a launch. A behaviour that hangs or ends the ranks costs a launch.

    Returns:
        The name of each behaviour with ``"passed"``, or ``"refused: "`` and the message.

    Raises:
        ConformanceError: lists each behaviour that failed, with what was seen, once all have run.
        OptionError: an unknown strategy or behaviour; or the strategy refuses to run at all.

    Example:
        A test of a package that brings a strategy::

            from distwrap.testing import check_strategy
            from my_package import Sharded

            @pytest.mark.parametrize("nprocs", [1, 2, 3])
            def test_it_behaves(nprocs):
                check_strategy(Sharded(), nprocs, refuses=["deepcopy", "lbfgs"])

        >>> check_strategy("ddp", 1, only=["attributes"])
        (('attributes', 'passed'),)
    """
    nprocs = AT_LEAST_ONE("nprocs", nprocs)
    names = list(BEHAVIOURS) if only is None else [name for name in BEHAVIOURS if name in only]
    for name in {*(only or ()), *refuses} - BEHAVIOURS.keys():
        raise OptionError(f"check_strategy(): {unknown_name('behaviour', name, BEHAVIOURS)}")
    options = Options().updated({"strategy": strategy, "timeout": min(timeout, 2 * _LIMIT), "returns": "all"})
    made = strategies.make(options.strategy)
    made.check(options)
    run = partial(run_with, options, timeout=timeout)
    found = {name: _launched(name, run, nprocs) for name in names if BEHAVIOURS[name].launches}
    with tempfile.TemporaryDirectory(prefix="distwrap-conformance-") as folder:
        found |= _in_one_launch([name for name in names if name not in found], run, nprocs, Path(folder))
    judged = [(name, _judged(name, found[name], refuses)) for name in names]
    failed = [f"  {name}: {verdict.words}" for name, verdict in judged if verdict.how == "failed"]
    if failed:
        raise ConformanceError(
            f"{type(made).__name__} on {nprocs} ranks: {len(failed)} of {len(names)} behaviours failed.\n"
            + "\n".join(failed)
        )
    return tuple((name, verdict.how + (verdict.words and f": {verdict.words}")) for name, verdict in judged)


def _launched(name: str, run: Callable[..., Any], nprocs: int) -> Verdict:
    """Do a behaviour that starts ranks of its own."""
    try:
        BEHAVIOURS[name].body(run, nprocs)
    except Exception as error:  # noqa: BLE001 - the verdict has it
        return Verdict.of(error)
    return Verdict("passed")


def _in_one_launch(names: list[str], run: Callable[..., Any], nprocs: int, folder: Path) -> dict[str, Verdict]:
    """Do behaviours in one launch; where one ends the ranks, the rest in another."""
    found: dict[str, Verdict] = {}
    while names:
        error: Exception | None = None
        try:
            run(perform, nprocs, names, folder, _LIMIT)
        except Exception as raised:  # noqa: BLE001 - the verdict has it
            error = raised
        done = 0
        for name in names:
            ranks = verdicts(folder, name)
            if len(ranks) < nprocs or words_of_end(folder, name):
                break
            found[name] = _together(ranks, BEHAVIOURS[name].may_refuse)
            done += 1
        if error is not None and not (folder / names[0]).exists():
            raise error  # before any behaviour
        if error is not None:
            ended = names[min(done, len(names) - 1)]
            words = words_of_end(folder, ended) or f"the ranks ended: {Verdict.of(error).words}"
            found[ended] = Verdict("failed", words)
            done = names.index(ended) + 1
        names = names[done:]
    return found


def _together(ranks: dict[int, Verdict], may_refuse: bool) -> Verdict:
    """Return one verdict of those of all ranks, by rank."""
    how: Literal["failed", "refused"]
    for how in ("failed", "refused"):
        those = {rank: verdict for rank, verdict in sorted(ranks.items()) if verdict.how == how}
        words = next((verdict.words for verdict in those.values()), "")
        if those and (len(those) == len(ranks) or (how == "refused" and may_refuse)):
            return Verdict(how, words)
        if those:
            return Verdict("failed", f"{how} on {named_ranks(those)} of {len(ranks)} alone: {words}")
    return Verdict("passed")


def _judged(name: str, verdict: Verdict, refuses: Collection[str]) -> Verdict:
    """Return a verdict in the light of what the strategy says that it refuses."""
    if verdict.how == "passed" and name in refuses:
        return Verdict("failed", "it passed, and refuses= lists it: take it out of there")
    if verdict.how == "refused" and not BEHAVIOURS[name].may_refuse and name not in refuses:
        return Verdict("failed", f"refused, where refuses= does not list it: {verdict.words}")
    return verdict
