"""One conversion under way: the script, its facts, the edits and helpers so far, and the list for the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import libcst as cst

from distwrap.convert.edits import Edits
from distwrap.convert.facts import ScriptFacts
from distwrap.convert.findings import Notes
from distwrap.convert.imports import Helpers
from distwrap.convert.reach import Reach
from distwrap.convert.script import Function, Script

Kind = Literal["model", "loader", "optimizer", "scheduler"]
BY_HAND = (
    "by hand, in the file that makes the model: @distributed on the function that trains, wrap_model(model) before the "
    "optimizer, shard_loader(loader)"
)


@dataclass(frozen=True)
class ConversionOptions:
    """Options of a conversion, as a user gives them.

    Attributes:
        strategy: for the decorator.
        nprocs: for the decorator.
        global_batch: whether the batch size of the script is that of all ranks together.
    """

    strategy: str | None = None
    nprocs: int | None = None
    global_batch: bool = False


class Prepared(NamedTuple):
    """Name of something that Accelerate or Fabric prepares.

    Attributes:
        kind: of the thing.
        path: the name or attribute that holds it.
        function: in which it has this name; none for the file's own level.
    """

    kind: Kind
    path: str
    function: Function | None


class Conversion:
    """Everything that the rules of a conversion share.

    Attributes:
        script: as it is.
        facts: what it holds.
        reach: what of it the ranks run.
        edits: what is to change.
        helpers: names of distwrap that it will use.
        notes: the list for the user.
        decorator_options: of the decorator, as text.
        below_imports: a line that stands below the script's imports.
        global_batch: whether the batch size of the script is that of all ranks together.
        wrapped: the paths of variables that hold wrapped models.
        wrapped_expressions: those that make these models.
        prepared: what Accelerate or Fabric prepares.
        own_batches: the training loops without a loader whose batches each rank has of its own.
        split_batches: those of them whose batches are divided among the ranks.
        averaged: the expressions whose values are averaged or added up over the ranks already.
        own_reads: the names that are read after a loop, as a rank's own share of the data has set them.
        rank_names: the variables that hold a rank, and so may stand for a device.
    """

    def __init__(self, script: Script, options: ConversionOptions) -> None:
        self.script = script
        self.facts, self.edits = ScriptFacts(script), Edits(script)
        self.reach = Reach(self.facts)
        self.helpers, self.notes = Helpers(script), Notes(script.text)
        self.decorator_options: dict[str, str] = {}
        if options.strategy is not None:
            self.decorator_options["strategy"] = f'"{options.strategy}"'
        if options.nprocs is not None:
            self.decorator_options["nprocs"] = str(options.nprocs)
        self.below_imports = ""
        self.global_batch = options.global_batch
        self.wrapped: set[str] = set()
        self.wrapped_expressions: set[cst.CSTNode] = set()
        self.prepared: list[Prepared] = []
        self.own_batches: set[cst.CSTNode] = set()
        self.split_batches: set[cst.CSTNode] = set()
        self.averaged: set[cst.CSTNode] = set()
        self.own_reads: set[cst.CSTNode] = set()
        self.rank_names: set[str] = set()

    def may_change(self, node: cst.CSTNode) -> bool:
        """Return whether a node's line is not to be ignored, and the node is not removed already."""
        return not self.notes.ignored(self.script.line(node)) and not self.edits.is_removed(node)

    def on_ranks(self, node: cst.CSTNode) -> bool:
        """Return whether the ranks run a piece of code, as far as calls by name tell."""
        return self.reach.holds(node)

    def under_rank_zero(self, statement: cst.CSTNode) -> None:
        """Put a statement of one line behind ``if is_rank_zero():``."""
        self.edits.insert(self.script.span(statement)[0], f"if {self.call('is_rank_zero')}: ")

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
