"""Make only rank 0 print, log and show progress."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import BARS, RANGES, RECORDS, WRITE_METHODS, WRITERS, WRITES
from distwrap.convert.script import argument, constant, is_about_rank, keywords_of, path_of


def show_once(conversion: Conversion) -> None:
    """Make only rank 0 print, log and show progress."""
    _prints(conversion)
    _bars(conversion)
    _files(conversion)
    for call in list(conversion.script.calls(*WRITERS)):
        if conversion.may_change(call) and conversion.on_ranks(call):
            conversion.wrap(call, "on_rank_zero", "")
            conversion.edits.insert(conversion.script.span(call)[0], "lambda: ")
            conversion.done(call, "on_rank_zero", "one run and not one a rank; elsewhere it takes any call")
    for call in list(conversion.script.calls(*RECORDS)):
        _under_rank_zero(conversion, call)
    for call, attribute in [each for level in ("debug", "info") for each in conversion.script.method_calls(level)]:
        is_logger = conversion.script.is_a(call, f"logging.{attribute.attr.value}") or any(
            source is not None and conversion.script.is_a(source, "logging.getLogger")
            for source in conversion.facts.values.sources(attribute.value)
        )
        if is_logger:
            _under_rank_zero(conversion, call)


def _prints(conversion: Conversion) -> None:
    script = conversion.script
    prints = [
        call for call in script.calls("builtins.print") if conversion.may_change(call) and conversion.on_ranks(call)
    ]
    handed = any(
        isinstance(script.parent(node), (cst.AssignTarget, cst.Param, cst.ImportAlias)) and node.value == "print"
        for node in script.find(cst.Name)
    )
    if prints and not handed:
        conversion.below_imports.append(f"print = {conversion.helpers.name('rank_zero_only')}(print)")
        elsewhere = f", here and at {len(prints) - 1} other place(s)" if len(prints) > 1 else ""
        conversion.done(prints[0], "print", f"rank 0 alone prints{elsewhere}")


def _bars(conversion: Conversion) -> None:
    script = conversion.script
    for call in list(script.calls(*BARS, *RANGES)):
        if not conversion.may_change(call) or not conversion.on_ranks(call):
            continue
        above = script.parent(call)
        holder = script.parent(above) if isinstance(above, cst.Arg) else above
        is_iterated = (isinstance(holder, cst.For) and holder.iter is call) or (
            isinstance(holder, cst.Call) and script.is_a(holder, "builtins.enumerate")
        )
        if is_iterated and script.is_a(call, *BARS) and call.args and call.args[0].keyword is None:
            if len(call.args) > 1 and call.args[1].keyword is None:
                conversion.unsure(call, "progress", "its second argument has no keyword", "progress(loader, desc=...)")
                continue
            conversion.rename_call(call, "progress")
            conversion.done(call, "progress", "rank 0 alone shows it")
        elif "disable" not in keywords_of(call.args):
            conversion.edits.add_argument(call, f"disable=not {conversion.call('is_rank_zero')}")
            conversion.done(call, "progress", "rank 0 alone shows it; it is used as an object, so it stays tqdm's")
        else:
            conversion.left(call, "progress", "every rank may show it", "disable=... or not is_rank_zero()")


def _files(conversion: Conversion) -> None:
    """Let rank 0 alone write files other than checkpoints; what the others write to an open file goes nowhere."""
    script = conversion.script
    for call in list(script.find(cst.Call)):
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        mode = constant(argument(call, "mode", 1)) if script.is_a(call, "builtins.open") else None
        opens = isinstance(mode, str) and mode[:1] in ("w", "a")
        if not conversion.may_change(call) or not conversion.on_ranks(call) or script.is_of_some_ranks(call):
            continue
        if any(is_about_rank(script.code(arg)) for arg in call.args):
            continue  # a file of each rank's own
        if script.is_a(call, "os.makedirs") and argument(call, "exist_ok", 2) is None:
            conversion.edits.add_argument(call, "exist_ok=True")
            conversion.done(call, "file", "another rank may have made it")
        elif opens and call.args[0].keyword is None:
            nowhere = "os.devnull" if "os" in script.bound_names else '"/dev/null"'
            conversion.edits.insert(
                script.span(call.args[0].value)[1], f" if {conversion.call('is_rank_zero')} else {nowhere}"
            )
            conversion.done(call, "file", "rank 0 alone writes it")
        elif script.is_a(call, *WRITES) or method in WRITE_METHODS:
            _under_rank_zero(conversion, call, "writes it")


def _under_rank_zero(conversion: Conversion, call: cst.Call, does: str = "logs it") -> None:
    """Put a call under ``if is_rank_zero():``, unless its arguments call functions that all ranks must run."""
    script = conversion.script
    statement = script.small_statement_of(call)
    if not conversion.may_change(call) or not conversion.on_ranks(call):
        return
    if script.is_of_some_ranks(call):
        return
    own = any(
        path_of(inner.func) in conversion.facts.values.functions
        for arg in call.args
        for inner in script.find(cst.Call, arg)
    )
    if (
        not own
        and isinstance(statement, cst.Expr)
        and statement.value is call
        and conversion.edits.has_line_of_its_own(statement)
    ):
        conversion.under_rank_zero(statement)
        conversion.done(call, "log" if does == "logs it" else "file", f"rank 0 alone {does}")
    else:
        rule = "log" if does == "logs it" else "file"
        conversion.left(
            call, rule, f"every rank {does}", "the value in a line of its own, then if is_rank_zero(): ...",
        )  # fmt: skip
