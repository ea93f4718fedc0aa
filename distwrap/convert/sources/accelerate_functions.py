"""Convert Accelerate's functions, and those of its object's methods that need more than a new name."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import ACCELERATE_LOGGERS, ACCELERATE_SEEDS, LEVELS
from distwrap.convert.script import argument, argument_node, constant, keyword_of, keywords_of, path_of


def convert_functions(conversion: Conversion) -> None:
    """Convert the seed and the logger, which logs only on rank 0 by default."""
    script = conversion.script
    for call in list(script.calls(*ACCELERATE_SEEDS)):
        apart = argument_node(call, "device_specific", 1)
        if apart is not None and constant(apart.value) not in (True, False):
            conversion.unsure(call, "seed", "device_specific= is not written here", "seed_everything(seed, apart=True)")
            continue
        seed = argument(call, "seed", 0)
        if seed is None or len(call.args) > 1 + (apart is not None):
            conversion.unsure(call, "seed", "its arguments have no equal", "seed_everything(seed)")
            continue
        more = ", apart=True" if apart is not None and constant(apart.value) is True else ""
        conversion.edits.replace(call, conversion.call("seed_everything", script.code(seed) + more))
        conversion.done(call, "seed", "seeds Python, numpy and torch, as set_seed does")
    for call in list(script.calls(*ACCELERATE_LOGGERS)):
        if len(call.args) == 1:
            conversion.helpers.replace_import(conversion.edits, ACCELERATE_LOGGERS[0])
            conversion.rename_call(call, "get_logger")
            conversion.done(call, "log", "says the rank, and logs on rank 0 alone where it is told to")
    for level in LEVELS:
        for call, attribute in list(script.method_calls(level)):
            sources = list(conversion.facts.values.sources(attribute.value))
            if sources and all(each is not None and script.is_a(each, *ACCELERATE_LOGGERS) for each in sources):
                _log(conversion, call)


def _log(conversion: Conversion, call: cst.Call) -> None:
    given = next((arg for arg in call.args if keyword_of(arg) == "main_process_only"), None)
    if "in_order" in keywords_of(call.args):
        conversion.unsure(call, "log", "in_order= has no equal", "barrier() between the ranks")
    elif given is None:
        conversion.edits.add_argument(call, "rank_zero=True")
        conversion.done(call, "log", "rank 0 alone logs it, as by default in Accelerate")
    elif given.keyword is not None:
        if constant(given.value) is False:
            conversion.edits.remove_argument(call, given)
        else:
            conversion.edits.replace(given.keyword, "rank_zero")
        conversion.done(call, "log", "the same ranks log it")


def state_dict_of(conversion: Conversion, call: cst.Call) -> bool:
    """Convert ``accelerator.get_state_dict(model)``; a wrapped model's own keys have no prefix."""
    path = path_of(call.args[0].value) if len(call.args) == 1 else None
    if path is None:
        return False
    conversion.edits.replace(call, f"{path}.state_dict()")
    return True


def local_first(conversion: Conversion, call: cst.Call) -> bool:
    """Convert ``with accelerator.local_main_process_first()``."""
    if call.args:
        return False
    conversion.edits.replace(call, conversion.call("rank_zero_first", "local=True"))
    return True


def save_state(conversion: Conversion, call: cst.Call) -> bool:
    """Convert ``accelerator.save_state(folder)`` to save prepared objects in one file in the folder."""
    state, path = _state(conversion, call), _path(conversion, call)
    statement, edits = conversion.script.small_statement_of(call), conversion.edits
    is_plain = isinstance(statement, cst.Expr) and statement.value is call and edits.has_line_of_its_own(statement)
    if state is None or path is None or not is_plain:
        return False
    edits.replace(call, f"os.makedirs({path}, exist_ok=True)")
    edits.line_after(statement, conversion.call("save", f"{state}, {_file(path)}"))
    return True


def load_state(conversion: Conversion, call: cst.Call) -> bool:
    """Convert ``accelerator.load_state(folder)`` to load the file that `save_state` writes."""
    state, path = _state(conversion, call), _path(conversion, call)
    if state is None or path is None:
        return False
    conversion.edits.replace(call, conversion.call("load", f"{_file(path)}, into={state}"))
    return True


def _file(path: str) -> str:
    return f'os.path.join({path}, "state.pt")'


def _path(conversion: Conversion, call: cst.Call) -> str | None:
    imported = [alias for each in conversion.script.find(cst.Import) for alias in each.names]
    is_imported = any(alias.evaluated_name == "os" and alias.asname is None for alias in imported)
    if (
        not is_imported
        or len(call.args) != 1
        or (call.args[0].keyword is not None and "dir" not in keyword_of(call.args[0]))
    ):
        return None
    return conversion.script.code(call.args[0].value)


def _state(conversion: Conversion, call: cst.Call) -> str | None:
    """Return a dict of the objects prepared in a call's function, without loaders, as text, or None."""
    function = conversion.script.function_of(call)
    names = dict.fromkeys(
        each.path for each in conversion.prepared if each.function is function and each.kind != "loader"
    )
    if not names:
        return None
    parts = [f'"{path.removeprefix("self.")}": {path}' for path in names]
    return f'{{{", ".join(parts)}, "run": {conversion.call("run_state")}}}'
