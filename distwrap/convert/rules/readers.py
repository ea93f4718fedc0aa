"""Give what reads a training loader outside of the training a loader of its own, with all samples, each once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import libcst as cst

from distwrap.convert.conversion import Conversion
from distwrap.convert.names import BARS
from distwrap.convert.rules.metrics import Reading
from distwrap.convert.rules.sums import add_up_sums, dataset_lengths
from distwrap.convert.script import argument, constant, path_of

Share = Literal["whole", "exact"]

_READS_NO_SAMPLES = ("builtins.len", "builtins.enumerate", "builtins.iter", "builtins.print", "builtins.repr",
                     "builtins.type", "builtins.isinstance", "builtins.id", *BARS)  # fmt: skip


@dataclass(eq=False)
class Reader:
    """Place outside of the training where a training loader is read.

    Attributes:
        node: the name of the loader there, which may be replaced by that of another loader.
        share: what this place needs: all samples on each rank, or each rank's share with each sample once.
        loop: the loop that reads, or None where a comprehension or a call does.
        is_served: whether it has got another loader.
    """

    node: cst.BaseExpression
    share: Share
    loop: cst.For | None = None
    is_served: bool = False


def readers_of(conversion: Conversion, loader: cst.Call, readings: dict[cst.For, Reading]) -> list[Reader]:
    """Return the places outside of the training that read a training loader and need another share of it."""
    script, facts = conversion.script, conversion.facts
    found = [
        Reader(name, "whole")
        for node in facts.mentions(loader)
        if _is_whole_pass(conversion, node)
        for name in _names_for(conversion, loader, node)
    ]
    for loop in facts.loops_over(loader):
        reading = readings[loop]
        if reading.is_training or any(isinstance(each, cst.Break) for each in script.nodes(loop.body)):
            continue
        share: Share | None = None
        if reading.unclear:
            share = "whole"
        elif (reading.sums or reading.lists) and not reading.why and shuffles(loader):
            share = "exact"
        if share is not None:
            found += [Reader(node, share, loop) for node in _names_for(conversion, loader, facts.iterated(loop))]
    return found


def give_own_loaders(conversion: Conversion, loader: cst.Call, readers: list[Reader], options: str) -> bool:
    """Shard a loader beside the one it is made of, which the readers get; return whether this could be done.

    Args:
        conversion: the current conversion.
        loader: a loader of the training.
        readers: what `readers_of` returned; not empty.
        options: further arguments of ``shard_loader``, as text.
    """
    script, edits = conversion.script, conversion.edits
    statement = script.assignment_of(loader)
    name = path_of(statement.targets[0].target) if statement is not None else None
    if statement is None or name is None or not _may_rename(conversion, loader, statement, name, readers):
        return False
    whole, exact = _free(f"whole_{name}", script.bound_names), _free(f"exact_{name}", script.bound_names)
    edits.replace(statement.targets[0].target, whole)
    edits.line_after(statement, f"{name} = {conversion.call('shard_loader', whole + options)}")
    if any(each.share == "exact" for each in readers):
        given = f'{whole}, mode="exact"{options}'
        edits.line_after(statement, f"{exact} = {conversion.call('shard_loader', given)}")
    for each in readers:
        each.is_served = True
        edits.replace(each.node, whole if each.share == "whole" else exact)
        why = (
            "this reads all of the data on every rank, as in one process: the loader for it is not sharded"
            if each.share == "whole"
            else "this evaluates each sample once, while the ranks' shares of the training repeat some samples"
        )
        conversion.done(each.node, "shard_loader", why)
    return True


def note_readers(conversion: Conversion, readers: list[Reader]) -> None:
    """Note the places that read a sharded loader of the training, and see one rank's share."""
    for each in readers:
        if each.share == "whole" and each.loop is None:
            conversion.left(
                each.node, "shard_loader", "this goes through a loader of the training, which is sharded: each rank "
                "reads its own share alone here, so that the result is another one on each rank",
                "a second DataLoader here, which is not sharded",
            )  # fmt: skip


def note_handed_on(conversion: Conversion, loader: cst.Call) -> None:
    """Note calls of code in other files that get a loader of the training."""
    script, facts = conversion.script, conversion.facts
    for node in facts.mentions(loader):
        above = script.parent(node)
        call = script.parent(above) if isinstance(above, cst.Arg) else None
        if not isinstance(call, cst.Call) or not isinstance(call.func, (cst.Name, cst.Attribute)):
            continue
        is_foreign = any(not name.startswith(("builtins.", "itertools.")) for name in script.names(call.func))
        if is_foreign and not script.is_a(call, *BARS) and not any(script.find(cst.CompFor, call)):
            conversion.left(
                call, "shard_loader", f"{path_of(call.func)}(...) gets the loader of the training, which is sharded, "
                "and may see one rank's share alone", "a second DataLoader here, which is not sharded",
            )  # fmt: skip


def note_repeated_samples(conversion: Conversion, reading: Reading, is_sharded: bool) -> None:
    """Note sums over a shuffled share, in which some samples are repeated, that are divided by the dataset's length."""
    for node in dataset_lengths(conversion, reading) if is_sharded else ():
        conversion.left(
            node, "metric", "where the samples do not divide evenly, the ranks' shares of a shuffled loader repeat a "
            f"few of them, so the sums have more samples than {conversion.script.code(node)}",
            "a count of the samples in the loop, added up with the sum",
        )  # fmt: skip


def shuffles(loader: cst.Call) -> bool:
    """Return whether a loader shuffles, so that the ranks' shares are filled up with samples of others."""
    return constant(argument(loader, "shuffle", 2)) not in (None, False) and argument(loader, "shuffle", 2) is not None


def add_up_readings(
    conversion: Conversion, readings: dict[cst.For, Reading], sharded: set[cst.Call], kept: set[cst.For],
    exact: set[cst.For],
) -> None:  # fmt: skip
    """Add up the results of the loops over sharded loaders.

    Args:
        conversion: the current conversion.
        readings: the results of each loop.
        sharded: the loaders that are sharded.
        kept: loops that go through all samples on each rank.
        exact: loops in which each sample comes once.
    """
    for loop, reading in readings.items():
        sources = conversion.facts.loader_of(conversion.facts.iterated(loop))
        if loop in kept or not any(each in sharded for each in sources if each is not None):
            continue
        add_up_sums(conversion, reading, all_shared=all(each in sharded for each in sources))
        repeats = any(each is not None and each in sharded and shuffles(each) for each in sources)
        note_repeated_samples(conversion, reading, repeats and loop not in exact)


def _is_whole_pass(conversion: Conversion, node: cst.BaseExpression) -> bool:
    """Return whether a comprehension, ``list()`` and the like goes through a loader at a node."""
    script, above = conversion.script, conversion.script.parent(node)
    while isinstance(above, cst.Arg):
        call = script.parent(above)
        if not isinstance(call, cst.Call):
            return False
        if not script.is_a(call, *_READS_NO_SAMPLES):
            names = script.names(call.func)
            return any(name.startswith("builtins.") and name != "builtins.next" for name in names)
        if not script.is_a(call, "builtins.enumerate", *BARS):
            return False
        above = script.parent(call)
    return isinstance(above, (cst.CompFor, cst.StarredElement))


def _names_for(conversion: Conversion, loader: cst.Call, node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield the names that give a loader to where it is read: the name there, or those in the calls of its function."""
    script, facts = conversion.script, conversion.facts
    function, path = script.function_of(node), path_of(node) or ""
    position = facts.values.parameter(function, path)
    if function is None or position is None or function is script.function_of(loader):
        yield node
        return
    trains = any(script.inside(each.loop, function) for each in facts.training_loops)
    passes_on = any(
        isinstance(above := script.parent(each), cst.Arg)
        and not script.is_a(script.parent(above), *_READS_NO_SAMPLES)
        and not _is_whole_pass(conversion, each)
        for each in script.reads(path, function.body)
    )
    for given in facts.values.given(function, path, position):
        if given is not None and loader in facts.loader_of(given):
            yield node if trains or passes_on else given


def _may_rename(
    conversion: Conversion, loader: cst.Call, statement: cst.Assign, name: str, readers: list[Reader]
) -> bool:
    script, values = conversion.script, conversion.facts.values
    function = script.function_of(loader)
    return (
        isinstance(statement.targets[0].target, cst.Name)
        and conversion.edits.has_line_of_its_own(statement)
        and len(values.bindings.get((function, name), [])) == 1
        and script.class_of(statement) is None
        and all(path_of(each.node) == name and script.function_of(each.node) is function for each in readers)
        and all(conversion.may_change(each.node) for each in readers)
    )


def _free(name: str, used: set[str]) -> str:
    while name in used:
        name += "_"
    return name
