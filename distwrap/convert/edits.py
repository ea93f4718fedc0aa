"""Edits of a script's text that keep comments, layout and quotes of everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import libcst as cst

from distwrap.convert.script import Script
from distwrap.errors import ConversionError

IMPORTS, LINE, WITHIN = range(3)


class Edit(NamedTuple):
    """Replacement of a range of bytes by text.

    Attributes:
        start: the first byte to replace.
        end: the byte after the last one to replace; equal to `start` for an insertion.
        text: the new text.
        number: the position of the edit in the order of the requests.
        layer: order of insertions at one place: imports, whole lines, text in a line.
        drops: whether other edits inside the range go with it; otherwise there may be none.
    """

    start: int
    end: int
    text: str
    number: int
    layer: int = WITHIN
    drops: bool = False


class Edits:
    """Edits of one script, which are collected and then applied at once."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._edits: list[Edit] = []
        self._removed: dict[cst.CSTNode, None] = {}

    def insert(self, place: int, text: str, layer: int = WITHIN) -> None:
        """Insert text before a byte."""
        self.replace_span(place, place, text, layer)

    def replace(self, node: cst.CSTNode, text: str, *, drops: bool = False) -> None:
        """Replace a node by text; `drops` says that edits inside of the node go with it."""
        self.replace_span(*self.script.span(node), text, drops=drops)

    def keep_inside(self, node: cst.CSTNode, inner: cst.CSTNode, before: str = "", after: str = "") -> None:
        """Replace what is around a part of a node; the part stays, with its edits."""
        (start, end), (first, last) = self.script.span(node), self.script.span(inner)
        self.replace_span(start, first, before)
        self.replace_span(last, end, after)

    def replace_span(self, start: int, end: int, text: str, layer: int = WITHIN, *, drops: bool = False) -> None:
        """Replace a range of bytes by text."""
        if '"' in text and any(low < start and end < high for low, high in self._double_quoted):
            text = text.replace('"', "'")  # before Python 3.12 an f-string may not contain its own quotes
        self._edits.append(Edit(start, end, text, len(self._edits), layer, drops or not text))

    @cached_property
    def _double_quoted(self) -> list[tuple[int, int]]:
        found = self.script.find(cst.FormattedString)
        return [self.script.span(each) for each in found if each.start.lstrip("fFrR") == '"']

    def wrap(self, node: cst.CSTNode, before: str, after: str) -> None:
        """Write text around a node and its parentheses."""
        start, end = self.script.span(node)
        self.insert(start, before)
        self.insert(end, after)

    def line_start(self, place: int) -> int:
        """Return the first byte of a line."""
        return self.script.data.rfind(b"\n", 0, place) + 1

    def line_end(self, place: int) -> int:
        """Return the byte after the line break of a line."""
        found = self.script.data.find(b"\n", place)
        return len(self.script.data) if found < 0 else found + 1

    def indent_of(self, node: cst.CSTNode) -> str:
        """Return the indentation of a statement's line."""
        start = self.script.span(node)[0]
        before = self.script.data[self.line_start(start) : start].decode()
        return before[: len(before) - len(before.lstrip())]

    def line_before(self, statement: cst.CSTNode, text: str) -> None:
        """Insert a line above a statement, with its indentation."""
        start = self.line_start(self.script.span(statement)[0])
        self.insert(start, f"{self.indent_of(statement)}{text}{self.script.newline}", LINE)

    def has_line_of_its_own(self, statement: cst.CSTNode) -> bool:
        """Return whether a statement is alone on its line, so that text can go before it."""
        line = self.script.parent(statement) if isinstance(statement, cst.BaseSmallStatement) else statement
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) > 1:
            return False
        return line is not None and isinstance(self.script.parent(line), (cst.IndentedBlock, cst.Module))

    def remove(self, node: cst.CSTNode) -> None:
        """Remove a statement; a block that becomes empty is removed with its header."""
        self._removed[node] = None

    def is_removed(self, node: cst.CSTNode) -> bool:
        """Return whether a node is removed, by itself or with a node around it."""
        return any(each in self._removed for each in (node, *self.script.ancestors(node)))

    def remove_arguments(self, call: cst.Call, gone: Sequence[cst.Arg]) -> None:
        """Remove arguments of a call, with their commas; the first one, or the last kept one, keeps its own."""
        kept = [number for number, each in enumerate(call.args) if each not in gone]
        last = kept[-1] if kept else -1
        for number, each in enumerate(call.args[: max(last, 0)]):
            if each in gone:
                self.replace_span(self.script.span(each)[0], self.script.span(call.args[number + 1])[0], "")
        if last + 1 < len(call.args):
            start = self.script.span(call.args[last].value)[1] if kept else self.script.span(call.args[0])[0]
            self.replace_span(start, self.script.span(call.args[-1].value)[1], "")

    def add_argument(self, call: cst.Call, text: str) -> None:
        """Add an argument to a call, after the existing ones."""
        if not call.args:
            self.insert(self.script.span(call)[1] - 1, text)
            return
        last = self.script.span(call.args[-1].value)[1]
        between = self.script.data[last : self.script.span(call)[1] - 1]
        place = last + len(between) - len(between.lstrip(b") \t\r\n"))  # after the parentheses around the last argument
        self.insert(place if between[: place - last].strip() else last, f", {text}")

    def replaces(self, node: cst.CSTNode) -> bool:
        """Return whether the whole text of a node is replaced by an edit."""
        start, end = self.script.span(node)
        return any(each.start <= start and end <= each.end for each in self._edits)

    def apply(self) -> str:
        """Return the edited text.

        Raises:
            ConversionError: two edits overlap, or one would swallow another.
        """
        self._settle_removals()
        data, result, place = self.script.data, [], 0
        for edit in self._outermost():
            if edit.start < place:
                raise self._internal(edit)
            result += [data[place : edit.start], edit.text.encode()]
            place = edit.end
        return b"".join([*result, data[place:]]).decode()

    def _outermost(self) -> Iterable[Edit]:
        """Return the edits in the order of the text, without those inside a range that is replaced as a whole."""
        whole = [edit for edit in self._edits if edit.end > edit.start]
        kept = []
        for edit in dict.fromkeys(self._edits):
            around = [other for other in whole if _is_gone(edit, other)]
            if around and not any(other.drops for other in around):
                raise self._internal(edit)
            kept += [] if around else [edit]
        return sorted(kept, key=lambda edit: (edit.start, edit.end > edit.start, edit.layer, edit.number))

    def _internal(self, edit: Edit) -> ConversionError:
        line = self.script.data.count(b"\n", 0, edit.start) + 1
        return ConversionError(
            f"{self.script.name}, line {line}: two changes want the same text, so none is made. Write the line in "
            f"simpler parts, and try again; and please report it with the line, as it is an error of distwrap's."
        )

    def _settle_removals(self) -> None:
        pending, self._removed = self._removed, {}
        gone = dict(pending)
        changed = True
        while changed:  # an empty block is removed with its header
            changed = False
            for node in list(gone):
                line = self.script.parent(node) if isinstance(node, cst.BaseSmallStatement) else node
                if line not in gone and isinstance(line, cst.SimpleStatementLine):
                    if all(each in gone for each in line.body):
                        gone[line] = None
                        changed = True
                    continue
                block = self.script.parent(line) if line is not None else None
                head = self.script.parent(block) if isinstance(block, cst.IndentedBlock) else None
                if (
                    isinstance(block, cst.IndentedBlock)
                    and isinstance(head, (cst.If, cst.With, cst.For))
                    and not (isinstance(head, (cst.If, cst.For)) and head.orelse is not None)
                    and not isinstance(self.script.parent(head), cst.If)
                    and head not in gone
                    and all(each in gone for each in block.body)
                ):
                    gone[head] = None
                    changed = True
        for node in gone:
            if not any(each in gone for each in self.script.ancestors(node)):
                self._remove_text(node, gone)

    def _remove_text(self, node: cst.CSTNode, gone: dict[cst.CSTNode, None]) -> None:
        start, end = self.script.span(node)
        if isinstance(node, cst.BaseSmallStatement):  # one of several statements on its line
            line = self.script.parent(node)
            assert isinstance(line, cst.SimpleStatementLine)
            index = next(number for number, each in enumerate(line.body) if each is node)
            if index + 1 < len(line.body):
                end = self.script.span(line.body[index + 1])[0]
            else:
                start = self.script.span(line.body[index - 1])[1]
            self.replace_span(start, end, "")
            return
        block = self.script.parent(node)
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)) and node.decorators:
            start = self.script.span(node.decorators[0])[0]
        only = isinstance(block, cst.IndentedBlock) and all(each in gone for each in block.body)
        if only and isinstance(block, cst.IndentedBlock) and block.body[0] is node:
            self.replace_span(start, end, "pass", drops=True)
        elif isinstance(block, (cst.IndentedBlock, cst.Module)):
            first, last = self.line_start(start), self.line_end(end)
            if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                last = self._behind_blank_lines(last)
            self.replace_span(first, last, "", LINE)
        else:
            self.replace_span(start, end, "pass", drops=True)

    def _behind_blank_lines(self, place: int) -> int:
        while place < len(self.script.data) and not self.script.data[place : self.line_end(place)].strip():
            place = self.line_end(place)
        return place


def _is_gone(edit: Edit, other: Edit) -> bool:
    """Return whether an edit lies inside the text that another edit replaces."""
    at_edge = edit.start == edit.end and edit.start in (other.start, other.end)
    is_longer = other.end - other.start > edit.end - edit.start
    return other.start <= edit.start and edit.end <= other.end and is_longer and not at_edge
