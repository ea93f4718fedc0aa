"""Fold branches on whether a script runs distributed: the branch for ranks stays, and also serves one process."""

from __future__ import annotations

import difflib
import re

import libcst as cst

from distwrap.convert.edits import Edits
from distwrap.convert.findings import Notes
from distwrap.convert.names import INIT, SAMPLER, SPAWN, WRAPPER
from distwrap.convert.script import Script, path_of

_NAMES = re.compile(r"(^|_)(distributed|ddp|use_dist|is_dist|multi_gpu|multiprocessing)(_|$)", re.IGNORECASE)
_PASSES = 6


def folded(script: Script) -> str | None:
    """Return a script without its branches for a run without ranks, or None if it has none.

    Example:
        >>> text = "import torch\\nif distributed:\\n    torch.distributed.init_process_group()\\nelse:\\n    x = 3\\n"
        >>> print(folded(Script(text)), end="")
        import torch
        torch.distributed.init_process_group()
    """
    flags = _flags(script)
    if not flags:
        return None
    for _ in range(_PASSES):
        edits = Edits(script)
        _fold_once(script, edits, flags)
        if not edits:
            break
        script = Script(edits.apply(), script.name)
    return _without_flags(script, flags)


def _flags(script: Script) -> set[str]:
    """Return the flags of a distributed run: names tested before the script joins a group, wraps or samples."""
    found = set()
    notes = Notes(script.text)
    for call in script.calls(*WRAPPER, *INIT, *SAMPLER, *SPAWN):
        for each in script.ancestors(call):
            if isinstance(each, cst.If) and script.inside(call, each.body) and not notes.ignored(script.line(each)):
                for node in _operands(each.test):
                    path = path_of(node)
                    if path is not None and _NAMES.search(path.rpartition(".")[2]):
                        found.add(path)
    return found


def _operands(test: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return [*_operands(test.left), *_operands(test.right)]
    return [test]


def _fold_once(script: Script, edits: Edits, flags: set[str]) -> None:
    """Fold the outermost conditions that contain a flag."""
    done: list[cst.CSTNode] = []
    for node in script.nodes():
        if any(script.inside(node, each) for each in done):
            continue
        if isinstance(node, (cst.If, cst.IfExp)):
            value = simplified(script, node.test, flags)
            if value is None:
                continue
            if isinstance(value, str):
                edits.replace(node.test, value)
                done.append(node.test)
                continue
            if isinstance(node, cst.IfExp):
                edits.replace(node, script.code(node.body if value else node.orelse))
            else:
                _choose(script, edits, node, taken=value)
            done.append(node)
        elif isinstance(node, cst.BooleanOperation):
            value = simplified(script, node, flags)
            if value is not None:
                edits.replace(node, value if isinstance(value, str) else str(value))
                done.append(node)


def simplified(script: Script, node: cst.BaseExpression, flags: set[str]) -> bool | str | None:
    """Return a condition with all flags true, as a truth value or text; None if it contains no flag."""
    if path_of(node) in flags:
        return True
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        value = simplified(script, node.expression, flags)
        return (not value) if isinstance(value, bool) else None if value is None else f"not ({value})"
    if not isinstance(node, cst.BooleanOperation):
        return None
    left, right = (simplified(script, each, flags) for each in (node.left, node.right))
    if left is None and right is None:
        return None
    sides = [_text(script, node.left) if left is None else left, _text(script, node.right) if right is None else right]
    decides = isinstance(node.operator, cst.Or)
    if any(each is decides for each in sides):
        return decides
    kept = [each for each in sides if isinstance(each, str)]
    word = "or" if decides else "and"
    return f" {word} ".join(kept) if kept else not decides


def _text(script: Script, node: cst.BaseExpression) -> str:
    text = script.code(node)
    return f"({text})" if isinstance(node, cst.BooleanOperation) and not text.startswith("(") else text


def _choose(script: Script, edits: Edits, branch: cst.If, *, taken: bool) -> None:
    """Replace an ``if`` by one of its branches."""
    start, end = script.span(branch)
    is_elif = isinstance(script.parent(branch), cst.If)
    other = branch.orelse
    if is_elif and taken:
        head = script.data[start : script.span(branch.test)[1]]
        edits.replace_span(start, start + len(head), "else")
        if other is not None:
            edits.replace_span(*_lines(script, edits, other), "")
        return
    if taken or not isinstance(other, cst.If):
        way = branch.body if taken else None if other is None else other.body
        text = "" if way is None else _dedented(script, edits, way, branch)
        if is_elif:  # its else, if any, now belongs to the branch above
            text = "" if other is None else edits.indent_of(branch) + script.code(other).rstrip() + script.newline
        alone = not text and len(script.siblings(branch)) == 1 and not is_elif
        text = f"{edits.indent_of(branch)}pass{script.newline}" if alone else text
        edits.replace_span(edits.line_start(start), edits.line_end(end - 1), text)
        return
    word = "elif" if is_elif else "if"
    edits.replace_span(start, script.span(other.test)[0], f"{word} ")


def _lines(script: Script, edits: Edits, node: cst.CSTNode) -> tuple[int, int]:
    start, end = script.span(node)
    return edits.line_start(start), edits.line_end(end - 1)


def _dedented(script: Script, edits: Edits, way: cst.BaseSuite, branch: cst.If) -> str:
    """Return the lines of a block, with the indentation of the ``if`` around it."""
    if not isinstance(way, cst.IndentedBlock):
        return f"{edits.indent_of(branch)}{script.code(way).strip()}{script.newline}"
    last = script.span(way.body[-1])[1]
    first = script.span(way)[0]
    place = edits.line_end(first) if script.data[first : edits.line_end(first)].strip() in (b"", b":") else first
    place = edits.line_start(script.span(way.body[0])[0]) if place >= script.span(way.body[0])[0] else place
    above = edits.line_start(place - 1)
    while above > script.span(branch.test)[1] and script.data[above:place].lstrip().startswith(b"#"):
        place, above = above, edits.line_start(above - 1)
    texts = script.long_texts(way)
    lines = []
    while place < last:
        end = edits.line_end(place)
        line = script.data[place:end].decode()
        is_text = any(low < place < high for low, high in texts)
        lines.append(line if is_text else line.removeprefix(script.indent))
        place = end
    return "".join(lines)


def _without_flags(script: Script, flags: set[str]) -> str:
    """Return a script without the assignments of flags that are never read."""
    edits = Edits(script)
    for flag in flags:
        assigns = [
            each
            for each in script.find(cst.Assign)
            if len(each.targets) == 1
            and path_of(each.targets[0].target) == flag
            and not any(script.find(cst.Call, each))
        ]
        reads = [
            node
            for node in script.expressions()
            if path_of(node) == flag and not any(script.inside(node, each) for each in assigns)
        ]
        reads = [node for node in reads if not isinstance(script.parent(node), cst.Attribute)]
        if not reads:
            for each in assigns:
                edits.remove(each)
    return edits.apply()


def at_lines_of(notes: Notes, before: Script, after: Script) -> Notes:
    """Return the notes for a folded script with the line numbers of the original."""
    old, new = ([line.strip() for line in each.text.splitlines()] for each in (before, after))
    lines: dict[int, int] = {}
    for block in difflib.SequenceMatcher(a=new, b=old, autojunk=False).get_matching_blocks():
        lines.update({block.a + index + 1: block.b + index + 1 for index in range(block.size)})
    found = Notes(before.text)
    for each in notes:
        number = each.line
        while number > 1 and number not in lines:
            number -= 1
        found.add(lines.get(number, 1), each.rule, each.why, each.fix, each.outcome)
    return found
