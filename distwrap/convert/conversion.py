"""State of one conversion: the script, its facts, the edits and helpers so far, and the notes for the user."""

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
        entry: the function that each rank runs; without one, each runs the whole script.
        edits: the edits so far.
        helpers: names of distwrap that the converted script uses.
        notes: the notes for the user.
        decorator_options: arguments of the decorator, as text.
        below_imports: lines to write below the script's imports.
        global_batch: whether the script's batch size is that of all ranks together.
        wrapped: names and attributes that hold wrapped models.
        rank_names: variables that hold a rank and may be used as a device.
    """

    def __init__(self, script: Script, options: ConversionOptions) -> None:
        self.script = script
        self.facts, self.edits = ScriptFacts(script), Edits(script)
        self.entry: Function | None = None
        self._run: set[Function] = set()
        self.helpers, self.notes = Helpers(script), Notes(script.text)
        self.decorator_options: dict[str, str] = {}
        if options.strategy is not None:
            self.decorator_options["strategy"] = f'"{options.strategy}"'
        if options.nprocs is not None:
            self.decorator_options["nprocs"] = str(options.nprocs)
        self.below_imports: list[str] = []
        self.global_batch = options.global_batch
        self.wrapped: set[str] = set()
        self.rank_names: set[str] = set()

    def may_change(self, node: cst.CSTNode) -> bool:
        """Return whether a node may be edited: its line is not ignored, and the node is not yet removed."""
        return not self.notes.ignored(self.script.line(node)) and not self.edits.is_removed(node)

    def on_ranks(self, node: cst.CSTNode) -> bool:
        """Return whether the ranks run a piece of code, judged by calls by name."""
        function = self.script.function_of(node)
        while self.entry is not None and function not in self._run:
            if function is None:
                return False
            function = self.script.function_of(function)
        return True

    def begin_at(self, entry: Function | None) -> None:
        """Set the function that the ranks run, with those that it calls; None for the whole script."""
        self.entry = entry
        self._run = set() if entry is None else self.facts.reached(entry) | {entry}

    def command(self) -> str:
        """Return the command that runs the result on ranks, without its name."""
        nprocs, strategy = (self.decorator_options.get(each, "").strip('"') for each in ("nprocs", "strategy"))
        if self.entry is not None:
            return "python" if nprocs else "DISTWRAP_NPROCS=2 python"
        return f"distwrap run -n {nprocs or 2}" + (f" --strategy {strategy}" if strategy else "")

    def under_rank_zero(self, statement: cst.CSTNode) -> None:
        """Put a one-line statement under ``if is_rank_zero():``."""
        self.edits.insert(self.script.span(statement)[0], f"if {self.call('is_rank_zero')}: ")

    def done(self, node: cst.CSTNode, rule: str, why: str) -> None:
        """Note a change that was made."""
        self.notes.add(self.script.line(node), rule, why, outcome="done")

    def left(self, node: cst.CSTNode, rule: str, why: str, fix: str = "") -> None:
        """Note code that was left on purpose, and what the user may write."""
        self.notes.add(self.script.line(node), rule, why, fix, outcome="left")

    def todo(self, node: cst.CSTNode, rule: str, why: str, fix: str) -> None:
        """Write a TODO line above a statement: what goes wrong there on several ranks, and the code to write."""
        if self.may_change(node) and self.notes.add(self.script.line(node), rule, why, fix, outcome="todo"):
            self.edits.line_before(self.script.statement_of(node), f"# TODO(distwrap): {why}: {fix}")

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
