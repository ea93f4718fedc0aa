"""How many Python functions of ours run in a step: at most as many as docs/explanation/step.md says."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import distwrap as dw
from distwrap.testing import run_ranks

_OURS = str(Path(dw.__file__).parent)
_PAGE = Path(__file__).parents[2] / "docs/explanation/step.md"


def _calls(call: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """Call a function, and return its result and the functions of ours that ran in it."""
    found: Counter[str] = Counter()

    def look(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(_OURS):
            found[f"{name[len(_OURS) + 1 :]}:{frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        result = call()
    finally:
        sys.setprofile(before)
    return result, found


def _of_a_step() -> list[Counter[str]]:
    """Return what ran in the forward, the backward and the step after some twenty others."""
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(21):  # of which the 16th is compared with other ranks, and the 21st is not
        x = torch.full((4, 4), number + dw.rank() / 2)
        output, in_forward = _calls(lambda: model(x))  # noqa: B023 - called at once
        _, in_backward = _calls(output.square().mean().backward)
        _, in_step = _calls(optimizer.step)
        optimizer.zero_grad()
        found = [in_forward, in_backward, in_step]
    return found


def test_calls_are_as_few_as_the_page_says() -> None:
    """Under DDP on two ranks; a number that falls is written down there, and one that rises has to be paid for."""
    said = [int(number) for number in re.findall(r"\| (\d+) \|$", _PAGE.read_text(), re.MULTILINE)]
    for found in run_ranks(_of_a_step, 2):
        assert len(said) == len(found)
        assert all(counts.total() <= most for counts, most in zip(found, said, strict=True)), found
