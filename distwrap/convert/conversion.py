"""One conversion under way: the script, its facts, the edits and helpers so far, and the list for the user."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from distwrap.convert.edits import Edits
from distwrap.convert.facts import ScriptFacts
from distwrap.convert.findings import Notes
from distwrap.convert.imports import Helpers
from distwrap.convert.script import Function, Script

BY_HAND = (
    "by hand, in the file that makes the model: @distributed on the function that trains, wrap_model(model) before the "
    "optimizer, shard_loader(loader)"
)


@dataclass(frozen=True)
class Wishes:
    """Options that a user gives a conversion.

    Attributes:
        strategy: for the decorator.
        nprocs: for the decorator.
        global_batch: whether the batch size of the script is that of all ranks together.
    """

    strategy: str | None = None
    nprocs: int | None = None
    global_batch: bool = False


class Conversion:
    """Everything that the rules of a conversion share.

    Attributes:
        script: as it is.
        facts: what it holds.
        edits: what is to change.
        helpers: names of distwrap that it will use.
        notes: the list for the user.
        options: of the decorator, as text.
        below_imports: a line that stands below the script's imports.
        wrapped: the paths of variables that hold wrapped models, for rules that come later.
        wrapped_expressions: those that make these models.
        fed: the training loops without a loader, whose batches each rank has of its own.
    """

    def __init__(self, script: Script, wishes: Wishes) -> None:
        self.script = script
        self.facts, self.edits = ScriptFacts(script), Edits(script)
        self.helpers, self.notes = Helpers(script), Notes(script.text)
        self.options: dict[str, str] = {}
        self.below_imports = ""
        self.wrapped: set[str] = set()
        self.fed: set[cst.CSTNode] = set()
        self.split: set[cst.CSTNode] = set()  # those of them whose batch is divided
        self.seeded_apart: set[cst.CSTNode] = set()  # statements before which each rank gets numbers of its own
        self.own_reads: set[cst.CSTNode] = set()  # names that are read after a loop, as a rank's own share has set them
        self.averaged: set[cst.CSTNode] = set()  # calls whose results are averaged already
        self.rank_names: set[str] = set()  # variables that hold a rank, and so may stand for a device
        self.wrapped_expressions: set[cst.CSTNode] = set()
        self.prepared: list[tuple[str, str, Function | None]] = []  # kind, path and function, by Accelerate or Fabric
        self.global_batch = wishes.global_batch
        self.entry: Function | None = None  # none: the file's own level
        self.region = (0, 0)  # the part of the file's own level that the ranks run, if there is no entry
        self._reached: set[Function] | None = None
        if wishes.strategy is not None:
            self.options["strategy"] = f'"{wishes.strategy}"'
        if wishes.nprocs is not None:
            self.options["nprocs"] = str(wishes.nprocs)

    def may_change(self, node: cst.CSTNode) -> bool:
        """Return whether a node's line is not to be ignored, and the node is not removed already."""
        return not self.notes.ignored(self.script.line(node)) and not self.edits.is_removed(node)

    def on_ranks(self, node: cst.CSTNode) -> bool:
        """Return whether the ranks run a piece of code, as far as calls by name tell."""
        function = self.script.function_of(node)
        if self.entry is None:
            return function is not None or self.region[0] <= self.script.span(node)[0] < self.region[1]
        if self._reached is None:
            self._reached = self.facts.reached(self.entry) | {self.entry}
        while function is not None:
            if function in self._reached:
                return True
            function = self.script.function_of(function)
        return False

    def done(self, node: cst.CSTNode, rule: str, why: str) -> None:
        """Note a change."""
        self.notes.add(self.script.line(node), rule, why, outcome="done")

    def left(self, node: cst.CSTNode, rule: str, why: str, fix: str = "") -> None:
        """Note what was left on purpose, and what a user may write."""
        self.notes.add(self.script.line(node), rule, why, fix, outcome="left")

    def unsure(self, node: cst.CSTNode, rule: str, why: str, fix: str = "") -> None:
        """Note what was left because its meaning is not clear."""
        self.notes.add(self.script.line(node), rule, why, fix, outcome="unsure")

    def call(self, helper: str, arguments: str = "") -> str:
        """Return a call of a helper as text."""
        return f"{self.helpers.name(helper)}({arguments})"

    def wrap(self, node: cst.CSTNode, helper: str, more: str = "") -> None:
        """Write a call of a helper around an expression."""
        self.edits.wrap(node, f"{self.helpers.name(helper)}(", f"{more})")

    def rename_call(self, call: cst.Call, helper: str) -> None:
        """Let a call go to a helper instead."""
        self.edits.replace(call.func, self.helpers.name(helper))
