"""`check_strategy`: prove that a strategy does all that the helpers of a hand-written loop ask of it."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch

from distwrap.checks import AT_LEAST_ONE
from distwrap.errors import ConformanceError, OptionError
from distwrap.options import Options
from distwrap.registry import strategies
from distwrap.strategies import Strategy
from distwrap.testing.behaviours import BEHAVIOURS
from distwrap.testing.behaviours.base import Behaviour
from distwrap.testing.exactness import computing_in
from distwrap.testing.on_ranks import Verdict, perform, verdicts, words_of, words_of_end
from distwrap.testing.ranks import Launch
from distwrap.wording import named_ranks, unknown_name

# Seconds that a rank waits for another, which goes on with the next behaviour only where all have ended this one.
_LIMIT = 20.0


def check_strategy(
    strategy: str | Strategy,
    nprocs: int = 2,
    *,
    only: Collection[str] | None = None,
    refuses: Collection[str] = (),
    dtype: torch.dtype = torch.float64,
    timeout: float = 300,
) -> tuple[tuple[str, str], ...]:
    """Run the conformance suite: each behaviour on real ranks, and its numbers against one process in plain torch.

    A behaviour is one thing that a hand-written loop does: it trains by AdamW, clips, accumulates, saves and resumes,
    evaluates uneven batches, copies the model. All of them run in one launch, on small nets of blocks that a strategy
    can divide; each is the function of its name in `distwrap.testing.behaviours`. What a strategy cannot do it must
    refuse by name on every rank, with a `ModelError`, `OptionError` or `PrecisionError`, and never by a hang, a wrong
    number, or the `DriftError` of ranks that have trained apart.

    Args:
        strategy: a name out of `available_strategies`, or a `Strategy`, which must be picklable.
        nprocs: how many ranks.
        only: names of the behaviours to run; by default all.
        refuses: names of the behaviours that this strategy refuses. It must: one that passes is reported as well.
        dtype: in which the nets compute, and are compared with one process: float64 to 1e-9, or, for an engine that has
            no other, float32 to 1e-5.
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
    for name in {*(only or ()), *refuses} - BEHAVIOURS.keys():
        raise OptionError(f"check_strategy(): {unknown_name('behaviour', name, BEHAVIOURS)}")
    chosen = {name: behaviour for name, behaviour in BEHAVIOURS.items() if only is None or name in only}
    return check_behaviours(chosen, strategy, nprocs, refuses=refuses, dtype=dtype, timeout=timeout)


def check_behaviours(
    behaviours: dict[str, Behaviour],
    strategy: str | Strategy,
    nprocs: int,
    *,
    refuses: Collection[str] = (),
    dtype: torch.dtype = torch.float64,
    timeout: float = 300,
) -> tuple[tuple[str, str], ...]:
    """Do as `check_strategy`, with behaviours that are the suite's own or others."""
    nprocs = AT_LEAST_ONE("nprocs", nprocs)
    options = Options().updated({"strategy": strategy, "timeout": min(timeout, 2 * _LIMIT), "returns": "all"})
    made = strategies.make(options.strategy)
    made.check(options)
    launch = Launch(options, nprocs, timeout, dtype)
    launched = {name: behaviour for name, behaviour in behaviours.items() if behaviour.launches}
    found = {name: _launched(behaviour, launch) for name, behaviour in launched.items()}
    with tempfile.TemporaryDirectory(prefix="distwrap-conformance-") as folder:
        together = {name: behaviour for name, behaviour in behaviours.items() if name not in found}
        found |= _in_one_launch(together, launch, Path(folder))
    judged = {name: _judged(found[name], behaviours[name], name in refuses) for name in behaviours}
    failed = [f"  {name}: {verdict.words}" for name, verdict in judged.items() if verdict.how == "failed"]
    if failed:
        raise ConformanceError(
            f"{type(made).__name__} on {nprocs} ranks: {len(failed)} of {len(judged)} behaviours failed.\n"
            + "\n".join(failed)
        )
    return tuple((name, verdict.how + (verdict.words and f": {verdict.words}")) for name, verdict in judged.items())


def _launched(behaviour: Behaviour, launch: Launch) -> Verdict:
    """Do a behaviour that starts ranks of its own."""
    try:
        with computing_in(launch.dtype):
            behaviour.body(launch)
    except Exception as error:  # noqa: BLE001 - the verdict has it
        return Verdict.of(error, behaviour)
    return Verdict("passed")


def _in_one_launch(behaviours: dict[str, Behaviour], launch: Launch, folder: Path) -> dict[str, Verdict]:
    """Do behaviours in one launch; where one ends the ranks, the rest in another."""
    found: dict[str, Verdict] = {}
    while left := {name: behaviour for name, behaviour in behaviours.items() if name not in found}:
        error: Exception | None = None
        try:
            launch(perform, left, folder, _LIMIT)
        except Exception as raised:  # noqa: BLE001 - the verdict has it
            error = raised
        for name, behaviour in left.items():
            ranks, words = verdicts(folder, name), words_of_end(folder, name)
            if error is None or (len(ranks) == launch.nprocs and not words):
                found[name] = _together(ranks, behaviour)
                continue
            if not (folder / name).exists() and name == next(iter(left)):
                raise error  # before any behaviour
            found[name] = Verdict("failed", words or f"the ranks ended: {words_of(error)}")
            break
        else:
            if error is not None:
                raise error  # after all of them, as the ranks ended
    return found


def _together(ranks: dict[int, Verdict], behaviour: Behaviour) -> Verdict:
    """Return one verdict of those of all ranks, by rank."""
    how: Literal["failed", "refused"]
    # Where one rank refuses, as DDP does a step too late, others may see what the step before has left behind.
    for how in ("refused", "failed") if behaviour.may_refuse else ("failed", "refused"):
        those = {rank: verdict for rank, verdict in sorted(ranks.items()) if verdict.how == how}
        words = next((verdict.words for verdict in those.values()), "")
        if those and (len(those) == len(ranks) or (how == "refused" and behaviour.may_refuse)):
            return Verdict(how, words)
        if those:
            return Verdict("failed", f"{how} on {named_ranks(those)} of {len(ranks)} alone: {words}")
    return Verdict("passed")


def _judged(verdict: Verdict, behaviour: Behaviour, is_refused: bool) -> Verdict:
    """Return a verdict in the light of what the strategy says that it refuses."""
    if verdict.how == "passed" and is_refused:
        return Verdict("failed", "it passed, and refuses= lists it: take it out of there")
    if verdict.how == "refused" and not behaviour.may_refuse and not is_refused:
        return Verdict("failed", f"refused, where refuses= does not list it: {verdict.words}")
    return verdict
