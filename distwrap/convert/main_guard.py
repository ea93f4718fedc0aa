"""Move the code at a script's module level into a main function, called behind a guard."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.edits import HEAD, INDENT, LINE
from distwrap.convert.script import Script, path_of

_CALLS = {"int", "float", "str", "bool", "len", "max", "min", "tuple", "list", "dict", "set", "range"}
_HARMLESS = {"os.environ.get", "os.getenv", "pathlib.Path", "warnings.filterwarnings", "logging.getLogger"}
_FREE = {"globals", "exec", "eval", "locals", "vars"}


def make_main(conversion: Conversion, needed: Sequence[cst.CSTNode]) -> str | None:
    """Move the code at module level into a function, called behind a guard.

    Args:
        conversion: the current conversion.
        needed: the code that the function must contain.

    Returns:
        The function's name, or None if this is not safe; the notes say why.
    """
    script, guard = conversion.script, conversion.facts.guard
    name = next(each for each in ("main", "train_main", "distributed_main") if each not in script.bound_names)
    of_file = [each for each in needed if script.function_of(each) is None]
    if guard is not None and all(script.inside(each, guard) for each in of_file):
        return _of_guard(conversion, guard, name)
    start = _start_of_region(script)
    if start is None:
        return None
    body = script.tree.body
    if guard is not None and (guard is not body[-1] or guard.orelse is not None):
        conversion.unsure(guard, "main", "some of the training is in the guard, and some outside", "put all into one")
        return None
    region = body[start:]
    problem = _problem(script, region, inner=True)
    if problem is not None:
        conversion.unsure(*problem)
        return None
    for node in _globals(script, region):
        if any(script.inside(node, each) for each in region):
            conversion.edits.replace(node, script.code(node).replace("global", "nonlocal", 1))
    if guard is not None:
        _open_guard(conversion, guard)
    _indent(conversion, body, start, name)
    conversion.done(body[start], "main", f"what runs at the file's own level became {name}(), behind a main guard")
    return name


def _of_guard(conversion: Conversion, guard: cst.If, name: str) -> str | None:
    script = conversion.script
    inner = _bound(script, [guard])
    users = [each for each in script.tree.body if each is not guard and _reads(script, each) & inner]
    shared = sorted(
        name for name in {each for one in users for each in _reads(script, one) & inner} if _stays_set(conversion, name)
    )
    annotated = {path_of(each.target) for each in script.find(cst.AnnAssign, guard)} & set(shared)
    if annotated or guard.orelse is not None or not isinstance(guard.body, cst.IndentedBlock):
        where = users[0] if users else guard
        conversion.unsure(
            where,
            "main",
            "it reads names that the main guard's block sets, which will be a function's own",
            "pass them as arguments",
        )
        return None
    problem = _problem(script, [guard])
    if problem is not None:
        conversion.unsure(*problem)
        return None
    start = script.span(guard)[0]
    test_end = conversion.edits.line_end(script.span(guard.test)[1])
    header = script.data[start:test_end].decode()
    behind = header[header.index(":", header.index(script.code(guard.test)) + len(script.code(guard.test))) :]
    if shared:
        indent = guard.body.indent if guard.body.indent is not None else script.indent
        behind += f"{indent}global {', '.join(shared)}{script.newline}"
        conversion.done(guard, "main", f"{', '.join(shared)} stay the file's own, since its functions read them")
    conversion.edits.replace_span(start, test_end, f"{decorator(conversion)}{script.newline}def {name}(){behind}")
    _add_guard(conversion, name)
    conversion.done(guard, "main", f"the main guard's block became {name}()")
    return name


def _open_guard(conversion: Conversion, guard: cst.If) -> None:
    """Remove the guard around its block, which becomes the end of the function, since ranks may import the file."""
    script, edits = conversion.script, conversion.edits
    start, end = script.span(guard)
    if not isinstance(guard.body, cst.IndentedBlock):
        edits.replace_span(start, script.span(guard.body)[0], "")
        return
    header_end = edits.line_end(script.span(guard.test)[1])
    edits.replace_span(start, header_end, "", LINE)
    edits.indented_already = (header_end, max(end, len(script.data)))


def _stays_set(conversion: Conversion, name: str) -> bool:
    """Return whether a name at module level is still assigned."""
    found = conversion.facts.values.bindings.get((None, name), [])
    return not found or not all(conversion.edits.is_removed(each.target) for each in found)


def _add_guard(conversion: Conversion, name: str) -> None:
    script, end = conversion.script, conversion.script.newline
    broken = "" if script.text.endswith("\n") or not script.text else end
    conversion.edits.insert(
        len(script.data), f'{broken}{end}{end}if __name__ == "__main__":{end}{script.indent}{name}(){end}'
    )


def decorator(conversion: Conversion) -> str:
    """Return the decorator as text."""
    options = ", ".join(f"{key}={value}" for key, value in conversion.decorator_options.items())
    return f"@{conversion.helpers.name('distributed')}" + (f"({options})" if options else "")


def _indent(conversion: Conversion, body: Sequence[cst.CSTNode], start: int, name: str) -> None:
    script, edits, end = conversion.script, conversion.edits, conversion.script.newline
    first = _first_byte(script, body, start)
    blank = "" if first == 0 else end * max(0, 2 - _blank_lines(script.data[:first]))
    edits.insert(first, f"{blank}{decorator(conversion)}{end}def {name}():{end}", HEAD)
    edits.indented_from = first
    texts = script.long_texts()
    place = first
    while place < len(script.data):
        line_end = edits.line_end(place)
        is_text = any(low < place < high for low, high in texts)
        if script.data[place:line_end].strip() and not is_text and not edits.is_indented_already(place):
            edits.insert(place, script.indent, INDENT)
        place = line_end
    _add_guard(conversion, name)


def _first_byte(script: Script, body: Sequence[cst.CSTNode], start: int) -> int:
    """Return the first byte of a statement's lines, including the comments right above it."""
    node = body[start]
    at = script.span(node)[0]
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)) and node.decorators:
        at = script.span(node.decorators[0])[0]
    place = script.data.rfind(b"\n", 0, at) + 1
    while place > 0:
        above = script.data.rfind(b"\n", 0, place - 1) + 1
        if not script.data[above:place].lstrip().startswith(b"#"):
            break
        place = above
    return place


def _blank_lines(data: bytes) -> int:
    lines = data.decode().split("\n")
    count = 0
    for line in reversed(lines[:-1]):
        if line.strip():
            break
        count += 1
    return count


def region_of(conversion: Conversion, needed: Sequence[cst.CSTNode]) -> tuple[int, int]:
    """Return the range of bytes that `make_main` would move into the function."""
    script, guard = conversion.script, conversion.facts.guard
    if guard is not None and all(script.inside(each, guard) for each in needed if script.function_of(each) is None):
        return script.span(guard)
    start = _start_of_region(script)
    return (len(script.data) if start is None else _first_byte(script, script.tree.body, start)), len(script.data)


def _start_of_region(script: Script) -> int | None:
    """Return the index of the first statement to move into the function; all later ones move too."""
    body = script.tree.body
    start = next((index for index, each in enumerate(body) if not _stays(script, each)), None)
    changed = start is not None
    while changed and start is not None:
        changed = False
        bound = _bound(script, body[start:])
        for index in range(start):
            each = body[index]
            is_definition = isinstance(each, (cst.FunctionDef, cst.ClassDef))
            reads = _reads(script, each) if is_definition else _bound(script, [each])
            if reads & bound and not _is_import(each):
                start, changed = index, True
                break
    return start


def _stays(script: Script, statement: cst.CSTNode) -> bool:
    """Return whether a statement stays at the top: an import, a definition, a docstring or a constant."""
    if isinstance(statement, (cst.FunctionDef, cst.ClassDef)) or _is_import(statement):
        return True
    if isinstance(statement, cst.Try):
        return all(_is_import(each) or isinstance(each, cst.SimpleStatementLine) for each in statement.body.body)
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    for small in statement.body:
        if isinstance(small, cst.Expr) and isinstance(small.value, (cst.SimpleString, cst.ConcatenatedString)):
            continue
        if not isinstance(small, (cst.Assign, cst.AnnAssign)) or small.value is None:
            return False
        for call in script.find(cst.Call, small.value):
            if path_of(call.func) not in _CALLS and not script.is_a(call, *_HARMLESS):
                return False
        if any(isinstance(each, (cst.Await, cst.Yield)) for each in script.nodes(small.value)):
            return False
    return True


def _is_import(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and all(
        isinstance(each, (cst.Import, cst.ImportFrom)) for each in statement.body
    )


def _bound(script: Script, statements: Sequence[cst.CSTNode]) -> set[str]:
    """Return the names that statements assign at module level."""
    found = set()
    for statement in statements:
        if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
            found.add(statement.name.value)
            continue
        for node in script.nodes(statement):
            if script.function_of(node) is not None or script.class_of(node) is not None:
                continue
            if isinstance(node, (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.For, cst.NamedExpr, cst.AsName)):
                target: cst.CSTNode = node.name if isinstance(node, cst.AsName) else node.target
                found |= {each.value for each in script.find(cst.Name, target) if path_of(target) or _is_list(target)}
            if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                found.add(node.name.value)
    return found


def _is_list(node: cst.CSTNode) -> bool:
    return isinstance(node, (cst.Tuple, cst.List))


def _reads(script: Script, definition: cst.CSTNode) -> set[str]:
    """Return the names that a definition, or one of a class's methods, reads and does not assign itself."""
    if not isinstance(definition, (cst.FunctionDef, cst.ClassDef)):
        return set()
    found: set[str] = set()
    for function in _functions(script, definition):
        own = {each.name.value for each in script.find(cst.Param, function)}
        for inner in script.nodes(function):
            if isinstance(inner, (cst.AssignTarget, cst.AnnAssign, cst.For, cst.CompFor, cst.NamedExpr)):
                own |= _plain_names(inner.target)
            elif isinstance(inner, cst.AsName):
                own |= _plain_names(inner.name)
        for node in script.find(cst.Name, function):
            if not script.is_label(node) and node.value not in own and node.value not in vars(builtins):
                found.add(node.value)
    return found


def _plain_names(target: cst.CSTNode) -> set[str]:
    """Return the names that a target assigns, without those whose item or attribute is assigned."""
    if isinstance(target, (cst.Tuple, cst.List)):
        return {name for each in target.elements for name in _plain_names(each.value)}
    return {target.value} if isinstance(target, cst.Name) else set()


def _functions(script: Script, definition: cst.CSTNode) -> list[cst.CSTNode]:
    inner = [each for each in script.find(cst.FunctionDef, definition) if script.function_of(each) is None]
    return [*inner, *([definition] if isinstance(definition, cst.ClassDef) else [])] if inner else [definition]


def _globals(script: Script, region: Sequence[cst.CSTNode]) -> list[cst.Global]:
    """Return the ``global`` statements for names that the given statements assign at module level."""
    bound = _bound(script, region)
    return [node for node in script.find(cst.Global) if {each.name.value for each in node.names} & bound]


def _problem(
    script: Script, region: Sequence[cst.CSTNode], *, inner: bool = False
) -> tuple[cst.CSTNode, str, str, str] | None:
    """Return why statements cannot move into a function, and what to do, or None.

    Args:
        script: the script of the statements.
        region: the statements to move.
        inner: whether functions among them become inner functions, whose ``global`` can become ``nonlocal``.
    """
    bound = _bound(script, region)
    for node in _globals(script, region):
        names = {each.name.value for each in node.names}
        if not (inner and names <= bound and any(script.inside(node, each) for each in region)):
            return (
                node, "main", f"{', '.join(sorted(names))} would be a function's own, and 'global' would miss it",
                "pass it as an argument and return it, or write the main function by hand",
            )  # fmt: skip
    for statement in region:
        for imported in script.find(cst.ImportFrom, statement):
            if isinstance(imported.names, cst.ImportStar):
                return imported, "main", "import * may not stand in a function", "import the names"
        for call in script.find(cst.Call, statement):
            if path_of(call.func) in _FREE and script.function_of(call) is None:
                return call, "main", "it looks at the file's own names", "write the main function by hand"
    return None
