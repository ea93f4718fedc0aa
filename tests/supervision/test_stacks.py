"""Where ranks are, in words."""

from __future__ import annotations

import bdb
import gc
import os
import sys
import sysconfig
import threading
import weakref

import pytest
import torch

from distwrap.supervision.activity import Activity
from distwrap.supervision.locations import Location, merge
from distwrap.supervision.stacks import Line, locate, of_frame, of_thread
from distwrap.testing import run_ranks
from distwrap.wording import named_ranks

TORCH = os.path.dirname(torch.__file__)
STDLIB = sysconfig.get_path("stdlib")
INSTALLED = sysconfig.get_path("purelib")
DISTWRAP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/distwrap"

MAIN: Line = ("/home/me/train.py", 88, "main")


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        ([], "main"),
        ([(f"{TORCH}/distributed/c10d_logger.py", 1, "wrapper"), (f"{TORCH}/x.py", 2, "all_reduce")], "all_reduce"),
        ([(f"{TORCH}/nn/modules/module.py", 1, "_call_impl"), (f"{TORCH}/nn/y.py", 2, "forward")], "forward"),
        ([(f"{TORCH}/_tensor.py", 1, "backward"), (f"{TORCH}/autograd/graph.py", 2, "_engine_run")], "backward"),
        ([(f"{TORCH}/utils/data/dataloader.py", 1, "__next__"), (f"{STDLIB}/queue.py", 2, "get")], "DataLoader"),
        ([(f"{STDLIB}/subprocess.py", 1, "run"), (f"{STDLIB}/subprocess.py", 2, "communicate")], "communicate"),
        ([(f"{TORCH}/optim/optimizer.py", 1, "wrapper"), (f"{DISTWRAP}/comm/weights.py", 1, "after")], "step"),
        ([(f"{DISTWRAP}/collectives.py", 1, "gather"), (f"{TORCH}/x.py", 1, "all_gather")], "gather"),
    ],
)
def test_the_line_that_the_user_looks_for(called: list[Line], expected: str) -> None:
    """Of a stack the innermost line of the user's is named, and what it called."""
    assert locate([("/home/me/run.py", 3, "<module>"), MAIN, *called]) == (expected, "train.py:88")


def test_code_that_is_installed() -> None:
    """Where the user's code is a package that is installed, it is found all the same."""
    stack = [(f"{INSTALLED}/mylib/loop.py", 5, "fit"), (f"{TORCH}/x.py", 1, "all_reduce")]
    assert locate(stack) == ("all_reduce", "loop.py:5")
    assert locate([]) == ("", "an unknown place")
    typed = [MAIN, (bdb.__file__, 90, "trace_dispatch"), ("<stdin>", 1, "<module>")]
    assert locate(typed)[1] == "train.py:88"  # not what is typed in a debugger
    assert locate([typed[1], MAIN])[1] == "train.py:88"  # nor all that one runs


def test_equal_places_stand_together() -> None:
    """Ranks at the same place are one line, and others have theirs."""
    here = Location("all_reduce", "train.py:88", 812)
    gone = dict.fromkeys((4, 5), "has left the function")
    report = merge({1: Location("DataLoader", "train.py:81"), 2: here, 0: here, 3: "does not answer", **gone})
    assert report.splitlines() == [
        "  ranks 0, 2 in all_reduce at train.py:88, step 812",
        "  rank 1 in DataLoader at train.py:81",
        "  rank 3 does not answer",
        "  ranks 4, 5 have left the function",
    ]


def test_ranks_in_words() -> None:
    """Neighbours are a range, if there are more than two of them."""
    assert named_ranks([3]) == "rank 3"
    assert named_ranks([5, 4]) == "ranks 4, 5"
    assert named_ranks([0, 1, 2, 3, 9, 11, 12]) == "ranks 0-3, 9, 11, 12"


def test_a_stack_that_runs() -> None:
    """The stack of this thread ends here, and so does that of its frame."""
    ident = threading.main_thread().ident
    assert ident is not None
    assert "test_a_stack_that_runs" in [name for _, _, name in of_thread(ident)]
    assert of_frame(sys._getframe())[-1][2] == "test_a_stack_that_runs"


def test_breadcrumbs() -> None:
    """The last helper is known with the line that called it, and the step by the loader's own count."""
    crumbs = Activity(None)
    assert (str(crumbs), crumbs.step) == ("", None)
    crumbs.record("gather")
    assert str(crumbs).startswith("gather at test_stacks.py:")
    batches = iter(torch.utils.data.DataLoader(range(10)))  # type: ignore[arg-type]
    crumbs.follow(batches)
    next(batches), next(batches)
    assert crumbs.step == 2
    del batches
    assert crumbs.step is None


class _Ends:
    """A cycle, whose end starts a thread."""

    def __init__(self) -> None:
        self.itself = self
        weakref.finalize(self, _start_a_thread).atexit = False


def _start_a_thread() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def _looks_while_garbage_is_collected() -> bool:
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for count in range(200):
            _Ends()
            _ = [[] for _ in range(count % 7)]  # so that a collection is due here or there
            of_thread(threading.get_ident())
        return gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)


def test_a_collection_while_somebody_looks_does_not_lock_the_interpreter() -> None:
    assert run_ranks(_looks_while_garbage_is_collected, 1, timeout=20) == [True]


def _look_from_below(depth: int) -> None:
    if depth:
        _look_from_below(depth - 1)
    else:
        of_thread(threading.get_ident())


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there a collection never comes while a frame's object is made")
def test_no_collection_while_frames_are_walked() -> None:
    """A frame whose object is being made may be gone after a collection, which lets its thread go on."""
    collected_in = []

    def note(phase: str, info: dict[str, int]) -> None:
        interrupted = sys._getframe(1)
        if phase == "start" and interrupted.f_code.co_name == "walk_stack":
            collected_in.append(interrupted.f_lineno)

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1, 1, 1)
    try:
        for depth in range(40):
            _look_from_below(depth)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert not collected_in
    assert gc.isenabled()
