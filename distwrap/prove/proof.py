"""A proof: worlds of one process and of several ranks, and in words what was found."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any
from xml.etree import ElementTree

import torch

from distwrap.errors import OptionError, ProofError
from distwrap.group.setup import import_before_group
from distwrap.prove.catalogue import BY_NAME
from distwrap.prove.comparison import Comparison, compare
from distwrap.prove.observer import Seen
from distwrap.prove.world import Program, common_batch, folder, run

_ROUNDING = 0.05  # share of a tensor, below which a difference is looked at in float64 too


@dataclass
class Proof:
    """What a proof has found.

    Attributes:
        verdict: ``"equal"``, ``"differs"``, ``"ignored"`` where a comment ignores all that differs, ``"not
            comparable"``, or ``"failed"`` where one process fails already.
        comparisons: with each number of ranks.
        notes: what was changed, and what was not seen.
    """

    verdict: str
    comparisons: list[Comparison]
    notes: list[str]

    @property
    def mistake(self) -> str:
        """The name of the first mistake in the catalogue; empty without one."""
        return next((each.mistake for each in self.wrong), "")

    @property
    def exit_code(self) -> int:
        """0 where all is equal or ignored, 1 where something differs, 2 where nothing could be proven."""
        return {"equal": 0, "ignored": 0, "differs": 1}.get(self.verdict, 2)

    @property
    def wrong(self) -> list[Comparison]:
        """The comparisons that differ; those that are ignored only where there are no others."""
        wrong = [each for each in self.comparisons if each.mistake]
        return [each for each in wrong if not each.is_ignored] or wrong

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        id = BY_NAME[self.mistake].id if self.mistake else ""
        return {
            **vars(self),
            "comparisons": [vars(each) for each in self.comparisons],
            "mistake": self.mistake,
            "id": id,
        }

    def as_junit(self) -> str:
        """Return it as JUnit's XML, with a test case for each comparison."""
        suite = ElementTree.Element("testsuite", name="distwrap prove")
        words = re.sub(r"[^\t\n -\ud7ff\ue000-\ufffd]", "", str(self))  # which XML has not
        for name, differs in {each.name: each in self.wrong for each in self.comparisons or [Comparison(1)]}.items():
            case = ElementTree.SubElement(suite, "testcase", classname="distwrap.prove", name=name)
            if self.exit_code == 2 or (self.exit_code == 1 and differs):
                ElementTree.SubElement(case, "failure", message=self.verdict).text = words
        return ElementTree.tostring(suite, encoding="unicode")

    def __str__(self) -> str:
        *others, last = [each.name.removesuffix(" ranks") for each in self.comparisons] or ["no"]
        counts = reduce(operator.or_, (each.compared for each in self.comparisons), Counter[str]())
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        steps = min((each.steps for each in self.comparisons), default=0)
        begun = f"{steps} step{'s' * (steps > 1)}" if steps else "the first step" if self.wrong else "no step"
        ranks = " and ".join([", ".join(others), last] if others else [last])
        lines = [f"{self.verdict}: {begun} in one process and on {ranks} ranks" + (f" ({kinds})" if kinds else "")]
        for mistake in dict.fromkeys(each.mistake for each in self.wrong):
            those, known = [each for each in self.wrong if each.mistake == mistake], BY_NAME[mistake]
            step = f"step {those[0].step}, " if those[0].step else ""
            lines.append(f"  {step}{those[0].what}{f' at {those[0].place}' if those[0].place else ''}")
            lines += [f"  on {each.name}: {each.how}" for each in those if each.how]
            lines += [f"  {known.id} {known.name}: {known.what}.", f"  What helps: {known.rule}."]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def prove(
    fn: Callable[..., Any],
    *args: Any,
    keywords: Mapping[str, Any] | None = None,
    ranks: Sequence[int] = (2, 3, 4),
    steps: int = 12,
    batch: int | None = None,
    epochs: int = 0,
    resume: bool = False,
    real: bool = False,
) -> Proof:
    """Prove that a loop computes on several simulated ranks what it computes in one process.

    Args:
        fn: a function with the loop, decorated or not.
        *args: its arguments.
        keywords: its arguments by name.
        ranks: numbers of ranks to compare with one process.
        steps: of optimizers, after which a rank has been seen enough.
        batch: size of the batch of all ranks together, which all numbers of ranks divide.
        epochs: in the place of steps: so many epochs, of ``steps`` batches at most.
        resume: whether it stops after its steps on the first number of ranks, goes on with the second from what it
            has saved in its folder, and is compared from there on.
        real: whether the ranks are processes, rather than simulated.

    Returns:
        The proof, which says what was compared.

    Raises:
        ProofError: something differs, or there was nothing to compare; the message names it.
        OptionError: a number of ranks does not divide the batch, or is below 2.

    Example:
        >>> import distwrap, torch
        >>> def train():
        ...     torch.manual_seed(0)
        ...     model = distwrap.wrap_model(torch.nn.Linear(1, 1))
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     model(torch.ones(12, 1)).mean().backward()
        ...     optimizer.step()
        >>> prove(train, ranks=[2]).verdict
        'equal'
    """
    program = Program("", args, keywords or {}, function=fn, real=real, steps=steps, epochs=epochs, batch=batch)
    proof = prove_program(program, ranks=ranks, resume=resume)
    if proof.exit_code:
        raise ProofError(str(proof))
    return proof


def prove_program(program: Program, *, ranks: Sequence[int] = (2, 3, 4), resume: bool = False) -> Proof:
    """Run the first steps of a program in one process and on several ranks, and compare them.

    Args:
        program: what is proven.
        ranks: numbers of ranks.
        resume: whether the second of them goes on from what the first has saved, and is compared alone.

    Raises:
        OptionError: a number of ranks does not divide the batch, or is below 2.
    """
    wrong = [number for number in ranks if number < 2 or (program.batch or 12) % number]
    if wrong or program.steps < 1 or program.epochs < 0:
        raise OptionError(
            "a proof looks at 1 step or more, and compares one process with 2 ranks or more, which divide the batch "
            f"({program.batch or 'a multiple of 12'}); got steps={program.steps}, epochs={program.epochs} and "
            f"ranks={[*ranks]}. Say batch= too."
        )
    import_before_group()
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports for two seconds what every world needs
    proof = _proof(program, ranks, resume)
    if proof.wrong and not program.double and all(each.size < _ROUNDING for each in proof.wrong):
        exact = _proof(replace(program, double=True), ranks, resume)
        if exact.verdict != "failed":
            exact.notes.append("in float64: in the loop's own type the rounding of a step grows in the next ones")
            return exact
    return proof


def _proof(program: Program, ranks: Sequence[int], resume: bool) -> Proof:
    longer = replace(program, steps=program.steps * (1 if program.epochs else 2), epochs=program.epochs * 2)
    comparisons, notes = list[Comparison](), set[str]()
    with folder() as place:
        one = run(longer if resume else program, 1, place / "1")
        if one.error:
            return Proof("failed", [], [f"in one process it fails: {one.error}"])
        alone = one.seen.get(0, Seen())
        program = replace(program, evaluated={size for size, trains in alone.trains.items() if size and not trains})
        for number in ranks[:1] if resume else ranks:
            several = run(program, number, place / f"{number}")
            if resume:
                several = run(program, ranks[:2][-1], place / f"{number}")
            comparisons.append(compare(one, several, number if resume else 0))
            if not (program.batch or several.error) and several.sizes - one.sizes:
                words = "the loop's batch size depends on the number of ranks: say --batch"
                comparisons[-1] = Comparison(number, is_comparable=False, notes=[words])
    refused = [each for each in comparisons if each.is_refused]
    if len(refused) < len(comparisons):
        comparisons = [each for each in comparisons if not each.is_refused]
        notes |= {f"{each.name} fail before their first step: {each.how.splitlines()[-1]}" for each in refused}
    seen = sum(each.compared["gradients"] + each.compared["returned numbers"] for each in comparisons)
    proof = Proof("not comparable", comparisons, [])
    if proof.wrong:
        proof.verdict = "ignored" if proof.wrong[0].is_ignored else "differs"
    elif seen and all(each.is_comparable for each in comparisons):
        proof.verdict = "equal"
    size_of = {size: program.batch or common_batch(size) for size in sorted(one.sizes)}
    sizes = ", ".join(f"{size} is {common}" for size, common in size_of.items() if size != common)
    of_one = {
        f"the batch of all ranks together is one that 2, 3 and 4 divide: {sizes}": sizes,
        f"switched off: {', '.join(sorted(alone.switched_off)[:3])}": alone.switched_off,
        "no evaluation was seen": not alone.evaluations,
        "the end of the loop was not seen": not one.has_ended,
    }
    notes |= {note for each in comparisons for note in each.notes}
    proof.notes += [*(note for note, holds in of_one.items() if holds), *sorted(notes)]
    return proof
