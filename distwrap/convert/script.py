"""A parsed script: its text, the position of each node in it, and the meaning of names."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, QualifiedNameSource, ScopeProvider

from distwrap.errors import ConversionError

Node = TypeVar("Node", bound=cst.CSTNode)
Function = cst.FunctionDef


class Script:
    """A script as text and as a syntax tree; it is never run.

    Attributes:
        name: the file name, for messages.
        data: the text as UTF-8 bytes, which `span` counts.
        tree: the syntax tree of the whole file.
    """

    def __init__(self, text: str, name: str = "<script>") -> None:
        self.name, self.text, self.data = name, text, text.encode()
        _refuse_unreadable(text, name)
        try:
            self._wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
            self.tree = self._wrapper.module
            self._spans: Any = self._wrapper.resolve(ByteSpanPositionProvider)
            self._nodes: list[cst.CSTNode] = []  # in the order of the text: those in a node follow it
            self._places: dict[cst.CSTNode, range] = {}  # in that list, of each node with those within it
            self._parents: dict[cst.CSTNode, cst.CSTNode] = {}
            self._of_kind: dict[type[cst.CSTNode], list[int]] = {}  # places in that list, for `find`
            self._names: dict[cst.CSTNode, set[str]] = {}
            self._list(self.tree)
        except cst.ParserSyntaxError as error:
            raise ConversionError(f"{name}, line {error.raw_line}: libcst cannot read this: {error.message}") from error
        except RecursionError as error:
            raise ConversionError(_nested(name)) from error

    @cached_property
    def newline(self) -> str:
        """The line break that this file uses."""
        return self.tree.default_newline

    @cached_property
    def indent(self) -> str:
        """The indentation of a block in this file."""
        return self.tree.default_indent

    def find(self, kind: type[Node], within: cst.CSTNode | None = None) -> Iterator[Node]:
        """Yield the nodes of a kind, in the order of the text."""
        if kind not in self._of_kind:
            self._of_kind[kind] = [place for place, node in enumerate(self._nodes) if isinstance(node, kind)]
        found, part = self._of_kind[kind], self._places[self.tree if within is None else within]
        for place in found[bisect_left(found, part.start) : bisect_left(found, part.stop)]:
            yield self._nodes[place]  # type: ignore[misc]

    def nodes(self, within: cst.CSTNode | None = None) -> Iterator[cst.CSTNode]:
        """Yield all nodes, or a node and all within it, in the order of the text."""
        part = self._places[self.tree if within is None else within]
        yield from self._nodes[part.start : part.stop]

    def _list(self, node: cst.CSTNode) -> None:
        start = len(self._nodes)
        self._nodes.append(node)
        for child in node.children:
            self._parents[child] = node
            self._list(child)
        self._places[node] = range(start, len(self._nodes))

    def expressions(self, within: cst.CSTNode | None = None) -> Iterator[cst.BaseExpression]:
        """Yield all expressions, in the order of the text."""
        for node in self.nodes(within):
            if isinstance(node, cst.BaseExpression):
                yield node

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the position of a node's first byte, and of the byte after its last."""
        place = self._spans[node]
        return place.start, place.start + place.length

    def code(self, node: cst.CSTNode) -> str:
        """Return a node's text as written in the file."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    def line(self, node: cst.CSTNode) -> int:
        """Return the number of a node's first line."""
        return self.data.count(b"\n", 0, self.span(node)[0]) + 1

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the parent of a node; None for the file."""
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the ancestors of a node, from the innermost."""
        above = self.parent(node)
        while above is not None:
            yield above
            above = self.parent(above)

    def function_of(self, node: cst.CSTNode) -> Function | None:
        """Return the function whose body, parameters or decorators contain a node, or None at module level."""
        return next((each for each in self.ancestors(node) if isinstance(each, cst.FunctionDef)), None)

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """Return the innermost class around a node, or None."""
        return next((each for each in self.ancestors(node) if isinstance(each, cst.ClassDef)), None)

    def statement_of(self, node: cst.CSTNode) -> cst.BaseStatement:
        """Return the statement line, or compound statement, that contains a node."""
        for each in (node, *self.ancestors(node)):
            if isinstance(each, cst.BaseStatement):
                return each
        raise ConversionError(f"{self.name}, line {self.line(node)}: there is no statement.")

    def small_statement_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the statement that contains a node: one of several on a line, or a whole compound one."""
        for each in (node, *self.ancestors(node)):
            if isinstance(each, (cst.BaseSmallStatement, cst.BaseStatement)):
                return each
        return node

    def names(self, node: cst.CSTNode) -> set[str]:
        """Return the full names of an imported or builtin expression, such as ``"torch.nn.Linear"``."""
        if node not in self._names:
            scope, kinds = self._scopes.get(node), (QualifiedNameSource.IMPORT, QualifiedNameSource.BUILTIN)
            found = scope.get_qualified_names_for(node) if scope is not None else ()
            self._names[node] = {each.name for each in found if each.source in kinds}
        return self._names[node]

    @cached_property
    def _scopes(self) -> Any:
        """The scope of each node, which takes libcst longest; of a script whose names nobody asks for, not at all."""
        try:
            return self._wrapper.resolve(ScopeProvider)
        except RecursionError as error:
            raise ConversionError(_nested(self.name)) from error

    def is_a(self, node: cst.CSTNode | None, *names: str) -> bool:
        """Return whether an expression, or a call's function, has one of the full names."""
        if isinstance(node, cst.Call):
            node = node.func
        return node is not None and bool(self.names(node) & set(names))

    def calls(self, *names: str, within: cst.CSTNode | None = None) -> Iterator[cst.Call]:
        """Yield the calls of functions with the given full names."""
        for call in self.find(cst.Call, within):
            if self.is_a(call, *names):
                yield call

    def method_calls(self, method: str, within: cst.CSTNode | None = None) -> Iterator[tuple[cst.Call, cst.Attribute]]:
        """Yield the calls of any object's method with this name, each with the called attribute."""
        for call in self.find(cst.Call, within):
            if isinstance(call.func, cst.Attribute) and call.func.attr.value == method:
                yield call, call.func

    def assignment_of(self, value: cst.CSTNode) -> cst.Assign | None:
        """Return the statement ``x = value`` that assigns a value to a single target, or None."""
        above = self.parent(value)
        is_whole = isinstance(above, cst.Assign) and above.value is value and len(above.targets) == 1
        return above if is_whole and isinstance(above, cst.Assign) else None

    def reads(self, path: str | None, within: cst.CSTNode | None = None) -> Iterator[cst.Name | cst.Attribute]:
        """Yield the reads of a name, or of a chain of attributes such as ``"self.model"``.

        Targets of assignments, keywords, attribute names and defined names are left out. A target in a tuple, a
        parameter and the like are included: there it is not clear what the name holds.
        """
        for node in self.nodes(within):
            if isinstance(node, (cst.Name, cst.Attribute)) and path is not None and path_of(node) == path:
                above = self.parent(node)
                is_defined = isinstance(above, (cst.FunctionDef, cst.ClassDef)) and above.name is node
                if not (isinstance(above, cst.AssignTarget) or is_defined or self.is_label(node)):
                    yield node

    def is_label(self, name: cst.CSTNode) -> bool:
        """Return whether a name is a keyword or attribute, not a variable."""
        above = self.parent(name)
        return (isinstance(above, cst.Arg) and above.keyword is name) or (
            isinstance(above, cst.Attribute) and above.attr is name
        )

    def is_of_some_ranks(self, node: cst.CSTNode) -> bool:
        """Return whether a node is inside an ``if`` that tests the rank."""
        return any(isinstance(each, cst.If) and is_about_rank(self.code(each.test)) for each in self.ancestors(node))

    def listed(self, nodes: Sequence[cst.CSTNode]) -> str:
        """Return arguments or imported names as text, separated by commas."""
        return ", ".join(self.code(each).rstrip().rstrip(",").rstrip() for each in nodes)

    def inside(self, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
        """Return whether a node is another node or a part of it."""
        start, end = self.span(node)
        first, last = self.span(outer)
        return first <= start and end <= last

    @cached_property
    def bound_names(self) -> set[str]:
        """All names that the script uses other than as attributes and keywords."""
        return {node.value for node in self.find(cst.Name) if not self.is_label(node)}


def _refuse_unreadable(text: str, name: str) -> None:
    """Raise an error for a script that Python cannot read; libcst ends the process for some of them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own
            ast.parse(text)
    except SyntaxError as error:
        where = name if error.lineno is None else f"{name}, line {error.lineno}"  # none for null bytes
        raise ConversionError(f"{where}: Python 3 cannot read this: {error.msg}") from error
    except ValueError as error:  # null bytes, in Python before 3.12
        raise ConversionError(f"{name}: Python 3 cannot read this: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise ConversionError(_nested(name)) from error


def _nested(name: str) -> str:
    return f"{name}: distwrap cannot read this: its code is nested too deep."


def argument(call: cst.Call, keyword: str, position: int | None = None) -> cst.BaseExpression | None:
    """Return the value that a call passes for a parameter, by keyword or position, or None."""
    found = argument_node(call, keyword, position)
    return None if found is None else found.value


def argument_node(call: cst.Call, keyword: str, position: int | None = None) -> cst.Arg | None:
    """Return the argument that a call passes for a parameter, by keyword or position, or None."""
    for index, arg in enumerate(call.args):
        if arg.keyword is not None:
            if arg.keyword.value == keyword:
                return arg
        elif arg.star:
            return None
        elif index == position:
            return arg
    return None


def keyword_of(arg: cst.Arg) -> str:
    """Return the keyword of an argument; empty if it has none."""
    return "" if arg.keyword is None else arg.keyword.value


def keywords_of(args: Sequence[cst.Arg]) -> set[str]:
    """Return the keywords of a call's arguments.

    Example:
        >>> keywords_of(cst.parse_expression("f(1, *a, x=2, y=3)").args) == {"x", "y"}
        True
    """
    return {arg.keyword.value for arg in args if arg.keyword is not None}


def path_of(node: cst.CSTNode | None) -> str | None:
    """Return a name or a chain of attributes as text, such as ``"self.model"``, or None for anything else.

    Example:
        >>> path_of(cst.parse_expression("self.model")), path_of(cst.parse_expression("f().x"))
        ('self.model', None)
    """
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        above = path_of(node.value)
        return None if above is None else f"{above}.{node.attr.value}"
    return None


def constant(node: cst.CSTNode | None) -> Any:
    """Return the value of a literal number, string, truth value or None; ``...`` for anything else."""
    if isinstance(node, (cst.Integer, cst.Float, cst.SimpleString)):
        return node.evaluated_value
    if isinstance(node, cst.Name):
        return {"True": True, "False": False, "None": None}.get(node.value, ...)
    return ...


def is_docstring(statement: cst.CSTNode) -> bool:
    """Return whether a statement is only a string."""
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, (cst.SimpleString, cst.ConcatenatedString))
    )


def is_about_rank(text: str) -> bool:
    """Return whether a condition tests the rank.

    Example:
        >>> [is_about_rank(each) for each in ("rank == 0", "get_rank() == 0 and x", "os.environ['RANK']", "ranking")]
        [True, True, True, False]
    """
    return (
        re.search(
            r"(?i)\b(local_|global_)?(rank|is_main_process|is_master|is_rank_zero|is_global_zero|process_index|get_rank)\b|\bgpu(_id)?\s*==\s*0",
            text,
        )
        is not None
    )


def read(path: Path) -> tuple[Script, str]:
    """Read a script, and return it with the file's encoding.

    Raises:
        ConversionError: the file cannot be read, or is not Python.
    """
    if path.suffix == ".ipynb":
        raise ConversionError(
            f"{path} is a notebook, and only scripts are read: 'jupyter nbconvert --to script {path}' makes one of it."
        )
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}. Give the path of a script.") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConversionError(
            f"{path} is not text in UTF-8: save it so in your editor, or name its encoding in its first line, as in "
            f"'# coding: latin-1'."
        ) from error
    return Script(text, str(path)), encoding
