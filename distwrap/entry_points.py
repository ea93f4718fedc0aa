"""What installed packages bring by entry points: the places of a group's names, and the import of one.

Source: https://packaging.python.org/en/latest/specifications/entry-points/.
"""

import pkgutil
from typing import Any

from distwrap.errors import OptionError


def of_packages(group: str) -> dict[str, tuple[str, ...]]:
    """Return the names of installed packages' entry points, each with its ``"module:name"`` in each package."""
    from importlib import metadata  # which costs as much as all the rest of this module

    found: dict[str, tuple[str, ...]] = {}
    for point in metadata.entry_points(group=group):
        found[point.name] = (*found.get(point.name, ()), point.value)
    return found


def load(what: str, places: tuple[str, ...]) -> Any:
    """Import what is at ``"module:name"``.

    Raises:
        OptionError: several packages have something of this name, or it cannot be imported.
    """
    if len(places) > 1:
        raise OptionError(f"{what} is in several packages: {' and '.join(places)}. Uninstall all but one of them.")
    try:
        return pkgutil.resolve_name(places[0])
    except (Exception, SystemExit) as error:
        raise OptionError(f"{what} cannot be imported from {places[0]}: {type(error).__name__}: {error}.") from error
