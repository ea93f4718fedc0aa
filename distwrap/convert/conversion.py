"""State of one conversion: the script, its facts, the edits and helpers so far, and the notes for the user."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from distwrap.convert.edits import Edits
from distwrap.convert.facts import ScriptFacts
from distwrap.convert.findings import Notes
from distwrap.convert.imports import Helpers
from distwrap.convert.reach import Reach
from distwrap.convert.script import Script

BY_HAND = (
    "by hand, in the file that makes the model: @distributed on the function that trains, wrap_model(model) before the "
    "optimizer, shard_loader(loader)"
)


@dataclass(frozen=True)
class ConversionOptions:
    """Options of a conversion, as the user gives them.

    Attributes:
        strategy: the decorator's ``strategy``.
        nprocs: the decorator's ``nprocs``.
        global_batch: whether the script's batch size is that of all ranks together.
    """

    strategy: str | None = None
    nprocs: int | None = None
    global_batch: bool = False


class Conversion:
    """State that the rules of a conversion share.

    Attributes:
        script: the script before the conversion.
        facts: facts about the script.
        reach: the part of the script that the ranks run.
        edits: the edits so far.
        helpers: names of distwrap that the converted script uses.
        notes: the notes for the user.
        decorator_options: arguments of the decorator, as text.
        below_imports: a line to write below the script's imports.
        global_batch: whether the script's batch size is that of all ranks together.
        wrapped: names and attributes that hold wrapped models.
        wrapped_expressions: expressions that make these models.
        own_batches: training loops without a loader in which each rank has its own batches.
        split_batches: those of `own_batches` whose batches are divided among the ranks.
        averaged: expressions whose values are already averaged or added up over the ranks.
        own_reads: names that are read after a loop, with a value from this rank's share of the data.
        rank_names: variables that hold a rank and may be used as a device.
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
        self.own_batches: set[cst.CSTNode] = set()
        self.split_batches: set[cst.CSTNode] = set()
        self.averaged: set[cst.CSTNode] = set()
        self.own_reads: set[cst.CSTNode] = set()
        self.rank_names: set[str] = set()

    def may_change(self, node: cst.CSTNode) -> bool:
        """Return whether a node may be edited: its line is not ignored, and the node is not yet removed."""
        return not self.notes.ignored(self.script.line(node)) and not self.edits.is_removed(node)

    def on_ranks(self, node: cst.CSTNode) -> bool:
        """Return whether the ranks run a piece of code, judged by calls by name."""
        return self.reach.holds(node)

    def under_rank_zero(self, statement: cst.CSTNode) -> None:
        """Put a one-line statement under ``if is_rank_zero():``."""
        self.edits.insert(self.script.span(statement)[0], f"if {self.call('is_rank_zero')}: ")

    def done(self, node: cst.CSTNode, rule: str, why: str) -> None:
        """Note a change that was made."""
        self.notes.add(self.script.line(node), rule, why, outcome="done")

    def left(self, node: cst.CSTNode, rule: str, why: str, fix: str = "") -> None:
        """Note code that was left on purpose, and what the user may write."""
        self.notes.add(self.script.line(node), rule, why, fix, outcome="left")

    def unsure(self, node: cst.CSTNode, rule: str, why: str, fix: str = "") -> None:
        """Note code that was left because its meaning is not clear."""
        self.notes.add(self.script.line(node), rule, why, fix, outcome="unsure")

    def call(self, helper: str, arguments: str = "") -> str:
        """Return a call of a helper as text."""
        return f"{self.helpers.name(helper)}({arguments})"

    def wrap(self, node: cst.CSTNode, helper: str, more: str = "") -> None:
        """Write a call of a helper around an expression."""
        self.edits.wrap(node, f"{self.helpers.name(helper)}(", f"{more})")

    def rename_call(self, call: cst.Call, helper: str) -> None:
        """Replace the called function by a helper."""
        self.edits.replace(call.func, self.helpers.name(helper))
