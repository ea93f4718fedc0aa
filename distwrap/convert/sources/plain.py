"""Convert plain loops for one process."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import BY_HAND, Conversion
from distwrap.convert.rules.accumulation import accumulate_in_windows
from distwrap.convert.rules.batches import share_own_batches
from distwrap.convert.rules.branches import agree_on_branches
from distwrap.convert.rules.closures import average_closures
from distwrap.convert.rules.devices import use_own_device
from distwrap.convert.rules.draws import draw_apart
from distwrap.convert.rules.entry import choose_entry, decorate_entry
from distwrap.convert.rules.files import save_and_load
from distwrap.convert.rules.loaders import shard_loaders
from distwrap.convert.rules.losses import note_losses
from distwrap.convert.rules.models import constructions, models_of, wrap_models
from distwrap.convert.rules.output import show_once
from distwrap.convert.rules.precision import use_precision


def convert_plain(conversion: Conversion) -> bool:
    """Convert a plain loop; return whether this succeeded.

    The order of the rules matters, here as in the other sources:

    - `choose_entry` comes first, since every rule needs to know what the ranks run.
    - `wrap_models` comes before the rules that look for wrapped models: draws, precision, accumulation, saves.
    - `share_own_batches` and `draw_apart` come before `shard_loaders`, which notes loops without a loader; what
      `draw_apart` averages must not be added up again either.
    - `shard_loaders` comes before `save_and_load` and `agree_on_branches`, which look for names with a value from the
      rank's own share of the data.
    - `decorate_entry` comes after all rules that set an option of the decorator: draws, loaders and precision.
    - `show_once` comes after `save_and_load`, which may convert a file that only rank 0 would write otherwise.
    """
    if not conversion.facts.optimizer_calls():
        loops = conversion.facts.training_loops
        conversion.unsure(
            loops[0].step, "wrap_model", "it is not clear which model this optimizer trains", BY_HAND,
        )  # fmt: skip
        return False
    needed = code_for_ranks(conversion)
    if not choose_entry(conversion, needed):
        return False
    if not wrap_models(conversion):  # an unwrapped model would train separately on each rank
        return False
    share_own_batches(conversion)
    draw_apart(conversion)
    shard_loaders(conversion)
    note_losses(conversion)
    average_closures(conversion)
    use_precision(conversion)
    accumulate_in_windows(conversion)
    use_own_device(conversion)
    save_and_load(conversion)
    if not decorate_entry(conversion, needed):
        return False
    show_once(conversion)
    agree_on_branches(conversion)
    return True


def code_for_ranks(conversion: Conversion) -> list[cst.CSTNode]:
    """Return the code that the ranks must run: loops, optimizers, models and loaders."""
    facts = conversion.facts
    made = [each for _, model in models_of(conversion) for each in constructions(conversion, model) if each is not None]
    return list(
        dict.fromkeys([
            *(each.loop for each in facts.training_loops),
            *facts.optimizer_calls(),
            *made,
            *sorted(facts.training_loaders, key=conversion.script.span),
        ])
    )  # fmt: skip
