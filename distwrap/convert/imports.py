"""Imports of a converted script: add those of distwrap's helpers, and remove those that became unused."""

from __future__ import annotations

import ast
import builtins

import libcst as cst

from distwrap.convert.edits import IMPORTS, Edits
from distwrap.convert.script import Script, is_docstring

_WIDTH = 100


class Helpers:
    """Names of distwrap that a converted script uses, each under a name that is free in the script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._names: dict[str, str] = {}

    def name(self, helper: str) -> str:
        """Return the name under which the script calls a helper, and mark it for import."""
        if helper not in self._names:
            taken = helper in self._script.bound_names
            self._names[helper] = f"distwrap_{helper}" if taken else helper
        return self._names[helper]

    def keep(self, used: set[str]) -> None:
        """Forget the helpers that the edited text does not use."""
        self._names = {helper: name for helper, name in self._names.items() if name in used}

    def line(self) -> str:
        """Return the import statement, on one line or in parentheses."""
        names = [helper if name == helper else f"{helper} as {name}" for helper, name in sorted(self._names.items())]
        line = f"from distwrap import {', '.join(names)}"
        if len(line) <= _WIDTH:
            return line
        end, indent = self._script.newline, self._script.indent
        return f"from distwrap import ({end}{''.join(f'{indent}{name},{end}' for name in names)})"

    def add(self, edits: Edits, *, following: str = "") -> None:
        """Insert the import below the script's other imports.

        Args:
            edits: the edits of the script.
            following: a line to write below the import, after an empty line.
        """
        end = self._script.newline
        last = _last_import(self._script)
        text = self.line() + end + (f"{end}{following}{end}" if following else "")
        if last is not None:
            place = edits.line_end(self._script.span(last)[1])
            edits.insert(place, text, IMPORTS)
            return
        body = self._script.tree.body
        first = next((each for each in body if not is_docstring(each)), None)
        if first is None:
            edits.insert(len(self._script.data), f"{end}{text}")
        else:
            start = self._script.span(first)[0]
            if isinstance(first, (cst.FunctionDef, cst.ClassDef)) and first.decorators:
                start = self._script.span(first.decorators[0])[0]
            edits.insert(edits.line_start(start), f"{text}{end}", IMPORTS)


def _last_import(script: Script) -> cst.CSTNode | None:
    """Return the last of the imports at the top of a file, before any other statement but a docstring."""
    last = None
    for statement in script.tree.body:
        if isinstance(statement, cst.SimpleStatementLine) and isinstance(
            statement.body[0], (cst.Import, cst.ImportFrom)
        ):
            last = statement
        elif not is_docstring(statement) and not isinstance(statement, (cst.Try, cst.If)) and last is not None:
            break
    return last


def used_names(text: str) -> set[str]:
    """Return the names that a program reads, including those in string annotations."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return found


def unbound_names(text: str) -> set[str]:
    """Return the names that a program reads, and that neither it nor Python binds anywhere.

    Example:
        >>> unbound_names("import a.b\\nfor c in a.b.d(len(e)): pass")
        {'e'}
    """
    read, bound = set[str](), {*vars(builtins), "__file__"}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                bound.add(name)
            case ast.ClassDef(name=str(name)) | ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                bound.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                bound.add(name)
            case ast.alias(name=name):
                bound.add(name.split(".")[0])
    return read - bound


def without_unused(before: str, script: Script) -> str:
    """Return a converted text without the imports that only the original text used."""
    lost = used_names(before) - used_names(script.text)
    edits = Edits(script)
    for statement in script.find(cst.ImportFrom):
        _drop(script, edits, statement, lost)
    for plain in script.find(cst.Import):
        _drop(script, edits, plain, lost)
    return edits.apply()


def _drop(script: Script, edits: Edits, statement: cst.Import | cst.ImportFrom, lost: set[str]) -> None:
    names = statement.names
    if isinstance(names, cst.ImportStar) or not all(isinstance(each, cst.ImportAlias) for each in names):
        return
    if isinstance(statement, cst.ImportFrom) and _module(statement) in ("distwrap", "__future__"):
        return
    kept = [each for each in names if _name(each) not in lost]
    if not kept:
        edits.remove(statement)
    elif len(kept) < len(names):
        start, end = script.span(names[0])[0], script.span(names[-1])[1]
        if b"\n" not in script.data[start:end] and b"#" not in script.data[start:end]:
            edits.replace_span(start, end, script.listed(kept))


def _module(statement: cst.ImportFrom) -> str:
    return "" if statement.module is None else cst.Module([]).code_for_node(statement.module)


def _name(alias: cst.ImportAlias) -> str:
    """Return the name that an import binds."""
    if alias.asname is not None:
        return cst.Module([]).code_for_node(alias.asname.name)
    node: cst.BaseExpression = alias.name
    while isinstance(node, cst.Attribute):
        node = node.value
    return node.value if isinstance(node, cst.Name) else ""
