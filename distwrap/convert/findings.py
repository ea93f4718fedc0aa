"""Findings: what was seen at a line of a script, why it matters, and what was done or should be done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from distwrap.prove.catalogue import is_ignored

Outcome = Literal["done", "todo", "left", "unsure"]

# Ids of the catalogue of mistakes.
_MISTAKES = {
    "sum": "DW102",
    "module": "DW104",
    "not-sharded": "DW201",
    "own-sum": "DW204",
    "metric": "DW204",
    "branch": "DW302",
    "closure": "DW401",
}


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that was seen in a script.

    Attributes:
        line: the line number.
        rule: a short name for the kind of problem.
        seen: the code, on one line.
        why: why it matters, or why nothing was done.
        fix: what to write; empty if it was done.
        outcome: whether it was done, became a TODO line, was left on purpose, or left because it is not clear.
    """

    line: int
    rule: str
    seen: str
    why: str
    fix: str = ""
    outcome: Outcome = "left"

    def text(self, name: str) -> str:
        """Return the finding as text.

        Example:
            >>> print(Finding(3, "seed", "randperm(9)", "ranks draw apart", "seed=0").text("a.py"))
            a.py:3: seed: randperm(9)
                ranks draw apart
                write: seed=0
        """
        known = f" ({_MISTAKES[self.rule]})" if self.rule in _MISTAKES else ""
        lines = [f"{name}:{self.line}: {self.rule}{known}: {self.seen}", f"    {self.why}"]
        return "\n".join([*lines, f"    write: {self.fix}"] if self.fix else lines)


class Notes:
    """Findings in a script, without those whose line says ``# distwrap: ignore``."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._found: dict[Finding, None] = {}

    def ignored(self, line: int, rule: str = "") -> bool:
        """Return whether a line has the comment that ignores it, or what a rule finds there."""
        return 0 < line <= len(self._lines) and is_ignored(self._lines[line - 1], _MISTAKES.get(rule, ""))

    def add(self, line: int, rule: str, why: str, fix: str = "", outcome: Outcome = "left") -> bool:
        """Add a finding at a line; return whether it is new, and not ignored there."""
        seen = self._lines[line - 1].strip() if 0 < line <= len(self._lines) else ""
        found = Finding(line, rule, seen, why, fix, outcome)
        if self.ignored(line, rule) or found in self._found:
            return False
        self._found[found] = None
        return True

    def __iter__(self) -> Iterator[Finding]:
        return iter(sorted(self._found))

    def __len__(self) -> int:
        return len(self._found)

    def of(self, *outcomes: Outcome) -> list[Finding]:
        """Return the findings with the given outcomes, in the order of the lines."""
        return [each for each in self if each.outcome in outcomes]


def report(notes: Iterable[Finding], name: str) -> Iterator[str]:
    """Yield the lines that tell the user what was done, what was left and what is not clear."""
    titles: dict[Outcome, str] = {
        "done": "done",
        "todo": "for you, at a TODO line",
        "left": "left as it is",
        "unsure": "not sure, so left as it is",
    }
    found = list(notes)
    for outcome, title in titles.items():
        chosen = [each for each in found if each.outcome == outcome]
        if chosen:
            yield f"{title}:"
            yield from (f"  {line}" for each in chosen for line in each.text(name).splitlines())
