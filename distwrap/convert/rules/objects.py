"""Replace methods and attributes of other libraries' objects by distwrap's functions, from a table of names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import libcst as cst

from distwrap.convert.conversion import Conversion, Kind, Prepared
from distwrap.convert.names import PREPARES
from distwrap.convert.rules.handed import find_where_handed
from distwrap.convert.script import argument, constant, keyword_of, path_of
from distwrap.convert.values import root_of

Special = Callable[[Conversion, cst.Call], bool]


def names_of(conversion: Conversion, made: tuple[str, ...]) -> tuple[list[cst.Call], set[str]] | None:
    """Return the calls that make an object and the names that hold it, or None if not all uses can be followed."""
    script = conversion.script
    calls, names = list(script.calls(*made)), set()
    for call in calls:
        statement = script.assignment_of(call)
        if statement is None:
            conversion.unsure(call, "object", "it is not simply given a name", "wrap_model and shard_loader by hand")
            return None
        names.add(path_of(statement.targets[0].target) or "")
    handed = find_where_handed(conversion, names)
    if handed is None:
        return None
    names = handed.names
    for node in [read for name in sorted(names) for read in script.reads(name)]:
        if handed.is_part(script.parent(node)) or isinstance(script.parent(node), cst.Attribute):
            continue
        conversion.unsure(node, "object", "it is handed on, so not all of its uses can be seen", "one function for all")
        return None
    attributes = {name.rpartition(".")[2] for name in names if "." in name}
    for attribute in script.find(cst.Attribute):  # trainer.accelerator may be self.accelerator
        if attribute.attr.value in attributes and path_of(attribute) not in names:
            conversion.unsure(attribute, "object", "it may be the object under another name", "one name for all uses")
            return None
    handed.remove(conversion)
    return calls, names


def convert_uses(
    conversion: Conversion,
    names: set[str],
    *,
    calls: Mapping[str, str | Special],
    values: Mapping[str, str],
    removed: tuple[str, ...],
    words: tuple[str, ...] = (),
) -> bool:
    """Convert each use of an object, or of a module.

    Args:
        conversion: the current conversion.
        names: names that hold the object.
        calls: for each method, the helper, or the function that converts its call.
        values: for each attribute, the text that replaces it.
        removed: methods whose calls are removed.
        words: attributes to skip, since they are converted together with other code.

    Returns:
        Whether all uses could be converted; if not, the notes list the others.
    """
    script, whole = conversion.script, True
    for node in list(script.find(cst.Attribute)):
        if path_of(node.value) not in names or node.attr.value in words:
            continue
        name, above = node.attr.value, script.parent(node)
        call = above if isinstance(above, cst.Call) and above.func is node else None
        statement = script.small_statement_of(node)
        fits = False
        if call is not None and name in removed:
            fits = isinstance(statement, cst.Expr) and statement.value is call
            if fits:
                conversion.edits.remove(statement)
        elif call is not None and name in calls:
            rule = calls[name]
            if isinstance(rule, str):
                conversion.rename_call(call, rule)
                fits = True
            else:
                fits = rule(conversion, call)
        elif call is None and name in values:
            helper, brackets, more = values[name].partition("()")
            conversion.edits.replace(node, conversion.helpers.name(helper) + brackets + more)
            fits = True
        if fits:
            is_gone = call is not None and name in removed
            why = f"{name} is not needed" if is_gone else f"distwrap has a function for {name}"
            conversion.done(node, "object", why)
        else:
            conversion.unsure(
                node, "object", f"{name} used in this way has no equal in the table", "see docs/guides/model.md"
            )
            whole = False
    return whole


def prepare(conversion: Conversion, call: cst.Call) -> bool:
    """Wrap the models and shard the loaders that a call prepares; leave optimizers and schedulers unchanged."""
    script = conversion.script
    texts: list[str] = []
    prepared: list[tuple[Kind, str | None]] = []
    for arg in call.args:
        if arg.keyword is not None or arg.star:
            return False
        text, kind = script.code(arg.value), kind_of(conversion, arg.value)
        if kind is None:
            return False
        if kind == "model":
            text = conversion.call("wrap_model", text)
            conversion.wrapped.add(path_of(arg.value) or "")
        elif kind == "loader":
            text = conversion.call("shard_loader", text)
        prepared.append((kind, path_of(arg.value)))
        texts.append(text)
    statement = script.assignment_of(call)
    conversion.prepared += [
        Prepared(kind, path, script.function_of(call)) for kind, path in prepared if path is not None
    ]
    if statement is not None:
        _remember_targets(conversion, statement, [kind for kind, _ in prepared])
    replace_or_drop(conversion, call, texts)
    return bool(texts)


def _remember_targets(conversion: Conversion, statement: cst.Assign, kinds: list[Kind]) -> None:
    target = statement.targets[0].target
    parts = [each.value for each in target.elements] if isinstance(target, cst.Tuple) else [target]
    for kind, part in zip(kinds, parts, strict=False):
        path = path_of(part)
        if path is not None:
            prepared = Prepared(kind, path, conversion.script.function_of(statement))
            if prepared not in conversion.prepared:
                conversion.prepared.append(prepared)


def replace_or_drop(conversion: Conversion, call: cst.Call, texts: list[str]) -> None:
    """Replace a call by values; in an assignment, drop ``x = x`` and write one line for each other value."""
    script, edits = conversion.script, conversion.edits
    statement = script.assignment_of(call)
    target = None if statement is None else statement.targets[0].target
    parts = [each.value for each in target.elements] if isinstance(target, cst.Tuple) else [target]
    if statement is None or len(parts) != len(texts) or not edits.has_line_of_its_own(statement):
        edits.replace(call, ", ".join(texts))
        return
    names = [script.code(each) for each in parts if each is not None]
    lines = [f"{name} = {text}" for name, text in zip(names, texts, strict=True) if name != text]
    mixes = any(name in re.split(r"\W+", text) for number, text in enumerate(texts) for name in names[:number])
    if not lines:
        edits.remove(statement)
    elif mixes:
        edits.replace(call, ", ".join(texts))
    else:
        edits.replace(statement, lines[0])
        for line in lines[1:]:
            edits.line_after(statement, line)


def kind_of(conversion: Conversion, node: cst.BaseExpression) -> Kind | None:
    """Return whether an expression is a model, a loader, an optimizer or a scheduler, or None if unknown."""
    facts = conversion.facts
    if facts.is_scheduler(node):
        return "scheduler"
    sources = [each for each in facts.values.sources(node, returned=True) if each is None or not _prepares(each)]
    roots = [None if each is None else root_of(each) for each in sources]
    if roots and all(each in facts.loaders for each in roots):
        return "loader"
    trained = {path_of(model) for call in conversion.script.find(cst.Call) for model in facts.trained_by(call)}
    if path_of(node) in trained:
        return "model"
    if roots and all(isinstance(each, cst.Call) and list(facts.trained_by(each)) for each in roots):
        return "optimizer"
    return None


def _prepares(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in (
        *PREPARES, "DistributedOptimizer",
    )  # fmt: skip


def reduction(keyword: str, default: str) -> Special:
    """Return a function that converts a reduction whose operation is a keyword argument."""

    def convert(conversion: Conversion, call: cst.Call) -> bool:
        kind = argument(call, keyword, 1)
        op = default if kind is None else constant(kind)
        others = [arg for arg in call.args[1:] if keyword_of(arg) not in (keyword, "name")]
        if op not in ("sum", "mean", "min", "max") or not call.args or (others and kind is not others[0].value):
            return False
        value = conversion.script.code(call.args[0].value)
        extra = "" if op == "mean" else f', op="{op}"'
        conversion.edits.replace(call, conversion.call("reduce", value + extra))
        return True

    return convert


def first_alone(helper: str) -> Special:
    """Return a function that converts calls with exactly one positional argument."""

    def convert(conversion: Conversion, call: cst.Call) -> bool:
        if len(call.args) == 1 and call.args[0].keyword is None:
            conversion.rename_call(call, helper)
            return True
        return False

    return convert


def print_once(conversion: Conversion, call: cst.Call) -> bool:
    """Convert a print on one rank only."""
    conversion.rename_call(call, "print")
    return True


def may_clip(conversion: Conversion) -> bool:
    """Return whether torch's functions can clip: torch is imported, and gradients are not scaled."""
    precision = conversion.decorator_options.get("precision", "")
    is_scaled = any(f'"{name}"' in precision for name in ("fp16", "16-mixed", "16"))
    return not is_scaled and "torch" in conversion.script.bound_names


def clip_with(function: str) -> Special:
    """Return a function that converts gradient clipping to the given torch function."""

    def convert(conversion: Conversion, call: cst.Call) -> bool:
        if not may_clip(conversion):
            return False
        conversion.edits.replace(call.func, f"torch.nn.utils.{function}")
        return True

    return convert
