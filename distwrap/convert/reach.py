"""What of a script the ranks run: a function with what it calls, or a part of the file's own level."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.facts import ScriptFacts
from distwrap.convert.script import Function


class Reach:
    """Part of a script that the ranks run; it is chosen before any rule asks for it.

    Attributes:
        entry: the function that each rank runs; none where one is to be made of the file's own level.
        region: the first byte of what such a function takes of that level, and the one after its last.
    """

    def __init__(self, facts: ScriptFacts) -> None:
        self._facts = facts
        self.entry: Function | None = None
        self.region = (0, 0)
        self._run: set[Function] = set()

    def begin_at(self, entry: Function) -> None:
        """Let the ranks run a function, with those that it calls."""
        self.entry, self._run = entry, self._facts.reached(entry) | {entry}

    def holds(self, node: cst.CSTNode) -> bool:
        """Return whether the ranks run a piece of code, as far as calls by name tell."""
        script = self._facts.script
        function = script.function_of(node)
        if self.entry is None:
            return function is not None or self.region[0] <= script.span(node)[0] < self.region[1]
        while function is not None:
            if function in self._run:
                return True
            function = script.function_of(function)
        return False
