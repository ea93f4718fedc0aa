"""Ranks of a divided model: those that do the same go on, and others end with an error, before numbers are mixed."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distwrap as dw
from distwrap.errors import CollectiveError, DeadlockError, ModelError
from distwrap.strategies import rendezvous
from distwrap.strategies.rendezvous import DECISIONS, EventOrder, Foresight, Rendezvous, Seen
from distwrap.testing import run_ranks, simulate

Program = list[tuple[str, int, int]]  # what, model or unit, detail

RANKS = 3


def program(chance: random.Random) -> Program:
    """Return some epochs of training and evaluation of two models, with reads, and layers that are dropped."""
    found: Program = []
    for _ in range(chance.randint(1, 3)):
        for _ in range(chance.randint(1, 3)):
            model, units = chance.randrange(2), [unit for unit in range(3) if chance.random() < 0.8]
            found.append(("forward", model, 1))
            found += [("unit", unit, -1) for unit in units]
            found += [("unit", unit, chance.choice([3, 3, 3, 1])) for unit in reversed(units)]
            found += [("read", 0, 0)] * chance.randrange(2)
        for _ in range(chance.randint(0, 2)):
            found += [("forward", 0, 0), *(("unit", unit, -1) for unit in range(3))]
    return found


def changed(own: Program, chance: random.Random) -> Program:
    """Return a program in which something is left out, made twice, exchanged with the next one, or another one."""
    at, what = chance.randrange(len(own)), chance.choice(["drop", "twice", "swap", "other", "end"])
    before, here, after = own[:at], own[at], own[at + 1 :]
    if what == "swap":
        return [*before, *after[:1], here, *after[1:]]
    other = ("unit", (here[1] + 1) % 3, here[2]) if here[0] == "unit" else ("forward", here[1], 1 - here[2])
    return {"drop": [*before, *after], "twice": [*before, here, here, *after], "other": [*before, other, *after]}.get(
        what, before
    )


def _run(programs: list[Program]) -> list[float]:
    """Make each event, and after it a collective of its own, which must not meet another one."""
    models = [Rendezvous(name, units=[["a", "b"], ["c"], ["d"]]) for name in ("First", "Second")]
    model, mixed = models[0], []
    for event in programs[dw.rank()]:
        what, number, detail = event
        if what == "forward":
            model = models[number]
            with torch.set_grad_enabled(bool(detail)):
                model.forward(averages=True)
        elif what == "unit":
            model.exchange(number, detail)
        else:
            model.read()
        if what != "forward":
            total = own = torch.tensor([float(hash((number, detail, what == "read")) % 2**31)], dtype=torch.float64)
            total = total.clone()
            dist.all_reduce(total)
            mixed.append(float((total - RANKS * own).abs()))
    return mixed


@pytest.mark.parametrize("seed", range(12))
def test_ranks_that_do_the_same_go_on_in_any_order(seed: int) -> None:
    """Whoever is first at an event."""
    same = program(random.Random(seed))
    for found in simulate(_run, RANKS, [same] * RANKS, schedule=seed):
        assert max(found, default=0.0) == 0.0


def test_ranks_that_differ_end_before_numbers_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of which one rank's was changed, in many orders; the states of the table are seen on the way.

    That all ranks stand in waits is noticed by the simulation itself; with real ranks it is in `test_fsdp_unison`.
    """
    seen, wait_for = set[Seen](), EventOrder._wait_for

    def noted(self: Any, *given: Any) -> Any:
        result = wait_for(self, *given)
        seen.add(result[0])
        return result

    monkeypatch.setattr(EventOrder, "_wait_for", noted)
    wrong = []
    for seed in range(60):
        chance = random.Random(1000 + seed)
        programs = [program(chance)] * RANKS
        programs[chance.randrange(RANKS)] = changed(programs[0], chance)
        if programs == [programs[0]] * RANKS:
            continue
        try:
            found = simulate(_run, RANKS, programs, schedule=seed)
        except (CollectiveError, ModelError, DeadlockError):
            continue
        if any(max(each, default=0.0) for each in found) or len({len(each) for each in found}) > 1:
            wrong.append(seed)
    assert wrong == []
    assert seen == {Seen.SAME, Seen.OTHER, Seen.PAST, Seen.LEFT}
    assert {state for state in seen if DECISIONS[state]} == {Seen.SAME}
    assert set(DECISIONS) == set(Seen)


def test_events_are_foreseen_from_those_before() -> None:
    """A turn that is like the one before is foreseen whole, and so is one after another kind of turn, once seen."""
    foresight = Foresight()
    train = [(1, -1, 3), (1, 0, -1), (1, 1, -1), (1, 1, 3), (1, 0, 3)]
    evaluate = [(1, -1, 0), (1, 0, -1), (1, 1, -1)]
    turns = [train, train, evaluate] * 3
    missed = []
    for turn in turns:
        missed.append(0)
        for event in turn:
            missed[-1] += foresight.next() != event
            foresight.note(event)
    assert missed[0] > 1
    assert missed[-3:] == [0, 0, 0]
    assert all(after <= before for before, after in pairwise(missed[::3]))


def _late() -> float:
    init = rendezvous.Rendezvous.__init__

    def slow(self: Any, *args: Any, **kwargs: Any) -> None:
        time.sleep(3 * rendezvous.ASK_SECONDS * dw.rank())
        init(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous.Rendezvous, "__init__", slow)
        torch.manual_seed(0)
        model = dw.wrap_model(nn.Linear(4, 1), strategy="fsdp")
    return model(torch.ones(1, 4)).item()


@pytest.mark.slow("waits for a limit to pass")
def test_a_rank_that_is_late_out_of_wrap_model_is_waited_for() -> None:
    """A busy machine may keep a rank in wrap_model() while another one runs its first forward."""
    first, second = run_ranks(_late, 2)
    assert first == second


def _waits_for_a_third() -> float:
    """Rank 1 waits for rank 2, which computes, and then runs its forward; rank 0 is there long before."""
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Linear(4, 1), strategy="fsdp")
    told = torch.zeros(1)
    if dw.rank() == 1:
        torch.distributed.recv(told, 2)
    elif dw.rank() == 2:
        time.sleep(rendezvous.STUCK_SECONDS + 3 * rendezvous.ASK_SECONDS)
        torch.distributed.send(told, 1)
    with torch.no_grad():
        return model(torch.ones(1, 4)).item()


@pytest.mark.slow("waits for a limit to pass")
def test_a_rank_that_waits_for_one_that_computes_is_waited_for() -> None:
    """A rank stands in an exchange of the user's own with a third one, which is still to come to it."""
    assert len(set(run_ranks(_waits_for_a_third, 3))) == 1
