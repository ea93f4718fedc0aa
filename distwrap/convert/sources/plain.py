"""A plain loop for one process."""

from __future__ import annotations

import libcst as cst

from distwrap.convert.conversion import BY_HAND, Conversion
from distwrap.convert.rules.accumulation import accumulate_in_windows
from distwrap.convert.rules.batches import note_sums, share_own_batches
from distwrap.convert.rules.branches import agree_on_branches
from distwrap.convert.rules.devices import use_own_device
from distwrap.convert.rules.draws import draw_apart
from distwrap.convert.rules.entry import choose_entry, decorate_entry
from distwrap.convert.rules.files import save_and_load
from distwrap.convert.rules.loaders import shard_loaders
from distwrap.convert.rules.models import constructions, models_of, wrap_models
from distwrap.convert.rules.output import show_once
from distwrap.convert.rules.precision import use_precision


def convert_plain(conversion: Conversion) -> bool:
    """Convert a plain loop; return whether it was done.

    The order of the rules matters, here as in the other sources:

    - `choose_entry` comes first, since every rule asks what the ranks run.
    - `wrap_models` comes before the rules that look for wrapped models: those of draws, precision, accumulation, saves.
    - `share_own_batches` and `draw_apart` come before `shard_loaders`, which notes the loops that nothing feeds, and
      `draw_apart` also since what it averages is not to be added up again.
    - `shard_loaders` comes before `save_and_load` and `agree_on_branches`, which ask for names that hold what a rank's
      own share has given.
    - `decorate_entry` comes after all that give the decorator an option: draws, loaders and precision.
    - `show_once` comes after `save_and_load`, which may take a file away that rank 0 would else write alone.
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
    if not wrap_models(conversion):  # one that is not wrapped would train apart on each rank
        return False
    share_own_batches(conversion)
    draw_apart(conversion)
    shard_loaders(conversion)
    note_sums(conversion)
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
    """Return the code that has to run on the ranks: loops, optimizers, models and loaders."""
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
