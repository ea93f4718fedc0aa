"""Convert plain loops for one process, and those with ``nn.DataParallel``."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import BY_HAND, Conversion
from distwrap.convert.names import DATA_PARALLEL
from distwrap.convert.rules.ddp import use_the_model_itself
from distwrap.convert.rules.devices import use_own_device
from distwrap.convert.rules.entry import choose_entry, write_entry
from distwrap.convert.rules.files import save_once
from distwrap.convert.rules.hints import say_what_is_left
from distwrap.convert.rules.loaders import shard_loaders
from distwrap.convert.rules.losses import wrong_losses
from distwrap.convert.rules.models import models_of, use_bare_models, wrap_models
from distwrap.convert.rules.output import show_once
from distwrap.convert.script import path_of


def is_data_parallel(conversion: Conversion) -> bool:
    """Return whether a script trains with DataParallel."""
    return any(conversion.script.calls(*DATA_PARALLEL))


def convert_data_parallel(conversion: Conversion) -> bool:
    """Convert a loop with DataParallel, whose batch is that of all devices; return whether this succeeded."""
    script = conversion.script
    conversion.global_batch = True
    for call in list(script.calls(*DATA_PARALLEL)):
        if not call.args or call.args[0].star or not conversion.may_change(call):
            conversion.unsure(call, "wrap_model", "its arguments are not clear", "wrap_model(model)")
            return False
        assign, model = script.assignment_of(call), script.code(call.args[0].value)
        if assign is not None and path_of(assign.targets[0].target) == model:
            conversion.edits.remove(assign)
        else:
            conversion.edits.keep_inside(call, call.args[0].value)
        conversion.done(call, "wrap_model", "one process a device, in the place of threads in one process")
    use_the_model_itself(conversion, DATA_PARALLEL)
    return convert_plain(conversion)


def convert_plain(conversion: Conversion) -> bool:
    """Convert a plain loop; return whether this succeeded.

    `choose_entry` comes first, since every rule needs to know what the ranks run; `write_entry` comes after the rules
    that set an option of the decorator; `show_once` comes after `save_once`, which converts some files.
    """
    facts = conversion.facts
    optimizers = facts.optimizer_calls()
    if not optimizers:
        conversion.unsure(
            facts.training_loops[0].step, "wrap_model", "it is not clear which model this optimizer trains", BY_HAND,
        )  # fmt: skip
        return False
    needed = code_for_ranks(conversion)
    choose_entry(conversion, needed)
    if not wrap_models(conversion):  # an unwrapped model would train separately on each rank
        return False
    shard_loaders(conversion)
    for training in facts.training_loops if conversion.global_batch else ():
        for call, why, fix in wrong_losses(facts, training):
            conversion.left(call, "sum", why, fix)
    use_own_device(conversion)
    save_once(conversion)
    use_bare_models(conversion)
    write_entry(conversion, needed)
    show_once(conversion)
    say_what_is_left(conversion)
    return True


def code_for_ranks(conversion: Conversion) -> list[cst.CSTNode]:
    """Return the code that the ranks must run: loops, optimizers, models and loaders."""
    facts = conversion.facts
    made = [each for _, model in models_of(facts) for each in facts.values.sources(model) if each is not None]
    loaders = sorted(facts.training_loaders, key=conversion.script.span)
    loops = [each.loop for each in facts.training_loops]
    return list(dict.fromkeys([*loops, *facts.optimizer_calls(), *made, *loaders]))
