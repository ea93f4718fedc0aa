"""Findings: what was seen at a line of a script, why it matters, and what was done or should be done."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["done", "left", "unsure"]

_IGNORE = re.compile(r"#\s*distwrap:\s*ignore\b")


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that was seen in a script.

    Attributes:
        line: the line number.
        rule: a short name for the kind of problem.
        seen: the code, on one line.
        why: why it matters, or why nothing was done.
        fix: what to write; empty if it was done.
        outcome: whether it was done, left on purpose, or left because it is not clear.
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
        lines = [f"{name}:{self.line}: {self.rule}: {self.seen}", f"    {self.why}"]
        return "\n".join([*lines, f"    write: {self.fix}"] if self.fix else lines)


class Notes:
    """Findings in a script, without those whose line says ``# distwrap: ignore``."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._found: dict[Finding, None] = {}

    def ignored(self, line: int) -> bool:
        """Return whether a line has the comment that ignores it."""
        return 0 < line <= len(self._lines) and _IGNORE.search(self._lines[line - 1]) is not None

    def add(self, line: int, rule: str, why: str, fix: str = "", outcome: Outcome = "left") -> None:
        """Add a finding at a line."""
        if not self.ignored(line):
            seen = self._lines[line - 1].strip() if 0 < line <= len(self._lines) else ""
            self._found[Finding(line, rule, seen, why, fix, outcome)] = None

    def __iter__(self) -> Iterator[Finding]:
        return iter(sorted(self._found))

    def __len__(self) -> int:
        return len(self._found)

    def of(self, *outcomes: Outcome) -> list[Finding]:
        """Return the findings with the given outcomes, in the order of the lines."""
        return [each for each in self if each.outcome in outcomes]


def report(notes: Iterable[Finding], name: str) -> Iterator[str]:
    """Yield the lines that tell the user what was done, what was left and what is not clear."""
    titles: dict[Outcome, str] = {"done": "done", "left": "left as it is", "unsure": "not sure, so left as it is"}
    found = list(notes)
    for outcome, title in titles.items():
        chosen = [each for each in found if each.outcome == outcome]
        if chosen:
            yield f"{title}:"
            yield from (f"  {line}" for each in chosen for line in each.text(name).splitlines())
