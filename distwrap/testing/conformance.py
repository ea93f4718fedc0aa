"""`check_strategy`: prove that a strategy does what the helpers of a hand-written loop ask of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import torch

from distwrap.checks import AT_LEAST_ONE
from distwrap.errors import CollectiveError, ConformanceError, DriftError, ModelError, OptionError, PrecisionError
from distwrap.group.world import current_world
from distwrap.options import Options
from distwrap.registry import strategies
from distwrap.strategies import Strategy
from distwrap.testing.behaviours import BEHAVIOURS, Behaviour
from distwrap.testing.nets import computing_in
from distwrap.testing.ranks import launch_ranks
from distwrap.testing.sides import Trial
from distwrap.wording import named_ranks, unknown_name

_LIMIT = 20.0  # seconds that a rank waits for another


def check_strategy(
    strategy: str | Strategy,
    nprocs: int = 2,
    *,
    only: Collection[str] | None = None,
    refuses: Collection[str] = (),
    dtype: torch.dtype = torch.float64,
    timeout: float = 60,
) -> tuple[tuple[str, str], ...]:
    """Check ten behaviours that any strategy must show, on real ranks, against one process in plain torch.

    A behaviour is one thing that a hand-written loop does: it trains by AdamW, clips, accumulates, scales a loss by
    counts, overflows in float16, saves and resumes, shards a loader, evaluates uneven batches. Each runs in a launch of
    its own, on small nets of blocks that a strategy can divide. What a strategy cannot do it must refuse by name on
    every rank, with a `ModelError`, `OptionError` or `PrecisionError`, and never by a hang, a wrong number, or the
    `DriftError` of ranks that have trained apart.

    Args:
        strategy: a name out of `available_strategies`, or a `Strategy`, which must be picklable.
        nprocs: how many ranks.
        only: names of the behaviours to run; by default all.
        refuses: names of the behaviours that this strategy refuses. It must: one that passes is reported as well.
        dtype: in which the nets compute, and are compared with one process: float64 to 1e-9, or, for an engine that has
            no other, float32 to 1e-5.
        timeout: seconds for a behaviour.

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
                check_strategy(Sharded(), nprocs, refuses=["fp16_overflow"])

        >>> check_strategy("ddp", 1, only=["ranks_are_in_sync"])
        (('ranks_are_in_sync', 'passed'),)
    """
    return check_behaviours(BEHAVIOURS, strategy, nprocs, only, refuses, dtype=dtype, timeout=timeout)


def check_behaviours(
    behaviours: Mapping[str, Behaviour],
    strategy: str | Strategy,
    nprocs: int = 2,
    only: Collection[str] | None = None,
    refuses: Collection[str] = (),
    *,
    dtype: torch.dtype = torch.float64,
    timeout: float = 60,
) -> tuple[tuple[str, str], ...]:
    """Do as `check_strategy`, with a table of behaviours."""
    for name in {*(only or ()), *refuses} - behaviours.keys():
        raise OptionError(f"check_strategy(): {unknown_name('behaviour', name, behaviours)}")
    nprocs = AT_LEAST_ONE("nprocs", nprocs)
    options = Options().updated({"strategy": strategy, "timeout": min(timeout, _LIMIT), "returns": "all"})
    made = strategies.make(options.strategy)
    made.check(options)

    launch = partial(launch_ranks, nprocs, options, timeout)
    launch(bool)  # what keeps the strategy from starting is raised as it is
    results, failed = [], []
    for name, behaviour in behaviours.items():
        if only is not None and name not in only:
            continue
        how, words = _tried(behaviour, launch, dtype)
        if how == "passed" and name in refuses:
            how, words = "failed", "it passed, and refuses= lists it: take it out of there"
        if how == "refused" and not behaviour.may_refuse and name not in refuses:
            how, words = "failed", f"refused, where refuses= does not list it: {words}"
        results.append((name, how + (words and f": {words}")))
        failed += [f"  {name}: {words}"] if how == "failed" else []
    if failed:
        raise ConformanceError(
            f"{type(made).__name__} on {nprocs} ranks: {len(failed)} of {len(results)} behaviours failed.\n"
            + "\n".join(failed)
        )
    return tuple(results)


def _tried(behaviour: Behaviour, launch: Callable[..., list[str]], dtype: torch.dtype) -> tuple[str, str]:
    """Return how a behaviour went: passed, refused or failed, and the message."""
    with tempfile.TemporaryDirectory(prefix="distwrap-conformance-") as folder:
        try:
            refused = launch(computing_in, dtype, _refusal, behaviour, Path(folder))
        except Exception as error:  # noqa: BLE001 - the caller lists it
            is_refused = behaviour.may_refuse and _is_refusal(error, CollectiveError)
            return "refused" if is_refused else "failed", _words(error)
    those = {rank: words for rank, words in enumerate(refused) if words}
    if not those:
        return "passed", ""
    words = next(iter(those.values()))
    if len(those) == len(refused):
        return "refused", words
    return "failed", f"refused on {named_ranks(those)} of {len(refused)} alone: {words}"


def _refusal(behaviour: Behaviour, folder: Path) -> str:
    """Do a behaviour on a rank; return the message where it is refused."""
    torch.set_num_threads(1)  # the nets are too small for more
    try:
        behaviour.body(Trial(current_world(), folder))
    except Exception as error:
        if behaviour.may_refuse or not _is_refusal(error):
            raise  # where one rank refuses, as DDP does a step too late, others see what the step before has left
        return _words(error)
    return ""


def _is_refusal(error: Exception, *more: type[Exception]) -> bool:
    """Return whether an error says what a strategy does not do. A hang, or ranks apart, is what it has done."""
    refusals: tuple[type[Exception], ...] = (ModelError, OptionError, PrecisionError, *more)
    return isinstance(error, refusals) and not isinstance(error, (DriftError, TimeoutError))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
