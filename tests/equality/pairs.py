"""Rows in which each pair of values comes up once at least, chosen greedily, and always the same ones."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

Pair = frozenset[str]


def allowed_pairs(dimensions: Mapping[str, Sequence[str]], forbidden: Collection[Pair]) -> list[Pair]:
    """Return each pair of values of two dimensions that may stand together, in a fixed order."""
    every = (
        frozenset(values)
        for one, other in itertools.combinations(dimensions.values(), 2)
        for values in itertools.product(one, other)
    )
    return [pair for pair in every if pair not in forbidden]


def covering_rows(dimensions: Mapping[str, Sequence[str]], forbidden: Collection[Pair]) -> list[tuple[str, ...]]:
    """Return rows, one value of each dimension, in which all allowed pairs come up.

    Each row begins with the first pair that is missing yet, and takes for the other dimensions what brings most of
    the missing ones.

    Raises:
        ValueError: no row has some allowed pair: what goes with the one value does not go with the other.
    """
    missing = dict.fromkeys(allowed_pairs(dimensions, forbidden))
    rows = []
    while missing:
        first = next(iter(missing))
        start = [next((value for value in values if value in first), "") for values in dimensions.values()]
        row = _completed(start, list(dimensions.values()), missing, forbidden)
        if row is None:
            raise ValueError(f"no row has both of {sorted(first)}: say so in the table of what is forbidden")
        rows.append(tuple(row))
        for pair in map(frozenset, itertools.combinations(row, 2)):
            missing.pop(pair, None)
    return rows


def _completed(
    row: list[str], dimensions: list[Sequence[str]], missing: Collection[Pair], forbidden: Collection[Pair]
) -> list[str] | None:
    """Fill the places of a row that are empty, or return ``None`` where none of its values go together."""
    place = next((place for place, value in enumerate(row) if not value), None)
    if place is None:
        return row
    taken = [value for value in row if value]
    able = [value for value in dimensions[place] if not any(frozenset((value, each)) in forbidden for each in taken)]
    for value in sorted(able, key=lambda value: -sum(frozenset((value, each)) in missing for each in taken)):
        found = _completed([*row[:place], value, *row[place + 1 :]], dimensions, missing, forbidden)
        if found is not None:
            return found
    return None
