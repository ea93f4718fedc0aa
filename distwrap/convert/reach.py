"""Find the code that the ranks run: a function with those it calls, or part of the module level."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.facts import ScriptFacts
from distwrap.convert.script import Function


class Reach:
    """Part of a script that the ranks run; it is set before any rule reads it.

    Attributes:
        entry: the function that each rank runs, or None if one is to be made from the module level.
        region: the range of bytes at module level that this new function takes.
    """

    def __init__(self, facts: ScriptFacts) -> None:
        self._facts = facts
        self.entry: Function | None = None
        self.region = (0, 0)
        self._run: set[Function] = set()

    def begin_at(self, entry: Function) -> None:
        """Set the function that the ranks run, with those that it calls."""
        self.entry, self._run = entry, self._facts.reached(entry) | {entry}

    def holds(self, node: cst.CSTNode) -> bool:
        """Return whether the ranks run a piece of code, judged by calls by name."""
        script = self._facts.script
        function = script.function_of(node)
        if self.entry is None:
            return function is not None or self.region[0] <= script.span(node)[0] < self.region[1]
        while function is not None:
            if function in self._run:
                return True
            function = script.function_of(function)
        return False
