"""Convert scripts with Horovod's functions, from a table of names.

Source: https://horovod.readthedocs.io/en/stable/pytorch.html
"""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import HOROVOD
from distwrap.convert.rules.devices import use_own_device
from distwrap.convert.rules.entry import choose_entry, decorate_entry
from distwrap.convert.rules.files import save_and_load
from distwrap.convert.rules.models import wrap_models
from distwrap.convert.rules.objects import Special, convert_uses, first_alone
from distwrap.convert.rules.samplers import shard_instead_of_sampling
from distwrap.convert.script import argument, keyword_of, keywords_of, path_of


def _optimizer(conversion: Conversion, call: cst.Call) -> bool:
    """Replace ``hvd.DistributedOptimizer`` by the optimizer; the models that it trains are wrapped instead."""
    names = keywords_of(call.args[1:])
    known = {"named_parameters", "compression", "op"}
    if not call.args or not names <= known or len(names) < len(call.args) - 1:
        return False
    kinds = set(_words(argument(call, "op")))
    if not kinds <= {"Average", "Adasum"} or kinds == {"Adasum"}:
        return False
    if "Adasum" in kinds:
        conversion.left(
            call, "comm", "Adasum has no equal, so gradients are averaged", "the learning rate for an average"
        )
    statement = conversion.script.small_statement_of(call)
    path = path_of(call.args[0].value)
    if isinstance(statement, cst.Assign) and [path_of(each.target) for each in statement.targets] == [path]:
        conversion.edits.remove(statement)
    else:
        conversion.edits.replace(call, conversion.script.code(call.args[0].value))
    return True


def _all_reduce(conversion: Conversion, call: cst.Call) -> bool:
    """Convert ``hvd.allreduce``, which averages by default."""
    names = keywords_of(call.args[1:])
    if not call.args or not names <= {"name", "op"} or len(names) < len(call.args) - 1:
        return False
    kind = argument(call, "op")
    op = "Average" if kind is None else (path_of(kind) or "").split(".")[-1]
    ops = {"Average": "", "Sum": ', op="sum"', "Min": ', op="min"', "Max": ', op="max"'}
    if op not in ops:
        return False
    value = conversion.script.code(call.args[0].value)
    conversion.edits.replace(call, conversion.call("reduce", value + ops[op]))
    return True


def _words(node: cst.BaseExpression | None) -> list[str]:
    """Return Horovod's constants that an expression chooses from, such as ``Average`` for ``hvd.Average``."""
    if node is None:
        return []
    if isinstance(node, cst.IfExp):
        return [*_words(node.body), *_words(node.orelse)]
    return [(path_of(node) or "").split(".")[-1]]


def _drop_compression(conversion: Conversion, names: set[str]) -> bool:
    """Remove variables with a compression for the optimizer; return whether none is used otherwise."""
    script = conversion.script
    for node in list(script.find(cst.Attribute)):
        if node.attr.value != "Compression" or path_of(node.value) not in names:
            continue
        statement = script.small_statement_of(node)
        if any(
            isinstance(each, cst.Call) and script.is_a(each, f"{HOROVOD}.DistributedOptimizer")
            for each in script.ancestors(node)
        ):
            above = script.parent(node)
            if isinstance(above, cst.Attribute) and above.attr.value == "fp16":
                _note_exchange_in_full(conversion, node)
            continue
        target = path_of(statement.targets[0].target) if isinstance(statement, cst.Assign) else None
        reads = [each for each in script.find(cst.Name) if each.value == target]
        if not isinstance(statement, cst.Assign) or not all(_is_option(conversion, each, statement) for each in reads):
            conversion.unsure(node, "comm", "its use is not clear", 'comm="powersgd" and others in wrap_model')
            return False
        conversion.edits.remove(statement)
        if "fp16" in _words(statement.value):
            _note_exchange_in_full(conversion, statement)
        else:
            conversion.done(statement, "comm", "gradients are exchanged as they are, as before")
    return True


def _note_exchange_in_full(conversion: Conversion, node: cst.CSTNode) -> None:
    conversion.left(
        node, "comm", "gradients are exchanged as they are, not in half precision",
        'comm= of wrap_model, see docs/guides/communication.md',
    )  # fmt: skip


def _is_option(conversion: Conversion, node: cst.Name, statement: cst.Assign) -> bool:
    above = conversion.script.parent(node)
    is_keyword = isinstance(above, cst.Arg) and keyword_of(above) == "compression"
    return is_keyword or conversion.script.inside(node, statement)


CALLS: dict[str, str | Special] = {
    "rank": "rank",
    "size": "world_size",
    "local_rank": "local_rank",
    "local_size": "local_world_size",
    "DistributedOptimizer": _optimizer,
    "allreduce": _all_reduce,
    "allgather": first_alone("gather"),
    "broadcast_object": first_alone("broadcast"),
}
WORDS = ("Sum", "Average", "Min", "Max", "Adasum", "Compression")
REMOVED = ("init", "shutdown", "broadcast_parameters", "broadcast_optimizer_state")


def _note_own_states(conversion: Conversion, names: set[str]) -> None:
    """Note broadcasts whose removal matters: each rank keeps the state that it loaded."""
    script = conversion.script
    loads = [call for call, _ in script.method_calls("load_state_dict")]
    if not loads:
        return  # no optimizer has a state yet
    tests = [each.test for load in loads for each in script.ancestors(load) if isinstance(each, cst.If)]
    for call, attribute in list(script.method_calls("broadcast_parameters")):
        if path_of(attribute.value) in names and any("rank" in script.code(test) for test in tests):
            conversion.left(
                call, "object", "no rank sends the weights that it has loaded to the others",
                "model.load_state_dict() on every rank, not on rank 0 alone",
            )  # fmt: skip
    for call, attribute in list(script.method_calls("broadcast_optimizer_state")):
        if path_of(attribute.value) in names:
            conversion.left(
                call, "object", "no rank sends the state of its optimizer to the others",
                "optimizer.load_state_dict() on every rank, not on rank 0 alone",
            )  # fmt: skip


def _steps_by_itself(conversion: Conversion) -> bool:
    """Return whether no Horovod optimizer is told when to exchange gradients."""
    script = conversion.script
    statements = [script.small_statement_of(call) for call in script.calls(f"{HOROVOD}.DistributedOptimizer")]
    targets = {path_of(each.target) for one in statements if isinstance(one, cst.Assign) for each in one.targets}
    for name in ("synchronize", "skip_synchronize"):
        for call, attribute in script.method_calls(name):
            if path_of(attribute.value) in targets:
                conversion.unsure(
                    call, "object", "gradients are averaged by the backward, and no optimizer is told when",
                    "optimizer_step(optimizer, max_norm=…), without synchronize() and skip_synchronize()",
                )  # fmt: skip
                return False
    return True


def is_horovod(conversion: Conversion) -> bool:
    """Return whether a script initializes Horovod."""
    return any(conversion.script.calls(f"{HOROVOD}.init"))


def convert_horovod(conversion: Conversion) -> bool:
    """Convert a script with Horovod; return whether this succeeded."""
    script = conversion.script
    names = {
        node.value
        for node in script.find(cst.Name)
        if HOROVOD in script.names(node) and not isinstance(script.parent(node), cst.ImportAlias)
    }
    needed: list[cst.CSTNode] = [*script.calls(f"{HOROVOD}.init"), *conversion.facts.optimizer_calls()]
    needed += [each.loop for each in conversion.facts.training_loops]
    if not choose_entry(conversion, needed):
        return False
    shard_instead_of_sampling(conversion)
    _note_own_states(conversion, names)
    if not _steps_by_itself(conversion) or not _drop_compression(conversion, names):
        return False
    if not wrap_models(conversion) or not convert_uses(
        conversion, names, calls=CALLS, values={}, removed=REMOVED, words=WORDS
    ):
        return False
    for call in list(script.calls("torch.cuda.set_device")):
        conversion.edits.remove(script.small_statement_of(call))
    use_own_device(conversion)
    save_and_load(conversion)
    return decorate_entry(conversion, needed)
