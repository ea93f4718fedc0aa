"""A rank's part of a list, for inference over prompts or files without a loader."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, cast

from distwrap.errors import LoaderError
from distwrap.group.world import current_world

Part_co = TypeVar("Part_co", covariant=True)
Part = TypeVar("Part")


class Sliceable(Protocol[Part_co]):
    """Object that has a length and can be sliced."""

    def __len__(self) -> int: ...
    def __getitem__(self, places: slice, /) -> Part_co: ...


def split(items: Sliceable[Part]) -> Part:
    """Return this rank's part of a list, as one slice; in a single process, the list itself.

    The parts follow each other in rank order. If the items cannot be divided evenly, the first ranks have one more;
    with fewer items than ranks, the last ranks have none. ``gather_object(results, joined=True)`` puts the results of
    all ranks back in the order of the list. No rank waits for another here, so the list must be the same on all of
    them: sort it if it comes from a folder or a set.

    Args:
        items: a list, a tuple, a tensor, or any other object with a length that can be sliced.

    Returns:
        The slice, in the type that slicing `items` gives.

    Raises:
        LoaderError: `items` has no length or cannot be sliced, as a generator, a set or a dict.

    Example:
        >>> prompts = split(["Hello", "Good morning", "Hi"])
        >>> gather_object([prompt.upper() for prompt in prompts], joined=True)
        ['HELLO', 'GOOD MORNING', 'HI']
    """
    layout = current_world().layout
    try:
        each, more = divmod(len(items), layout.size)
        start = layout.rank * each + min(layout.rank, more)
        count = each + (layout.rank < more)
        part: Any = items[start : start + count]
        is_part = len(part) == count and not isinstance(part, Mapping)
    except (TypeError, KeyError) as error:
        raise _refusal(items) from error
    if not is_part:  # as a slice of a table of Hugging Face, or of a TensorDataset, which are columns
        raise _refusal(items)
    return cast("Part", items if layout.size == 1 else part)


def _refusal(items: object) -> LoaderError:
    hint = "list(items)"
    if isinstance(items, Mapping):
        hint = "list(items.items())"
    elif isinstance(items, (set, frozenset)):
        hint = "sorted(items), since the ranks may go through a set in different orders"
    return LoaderError(
        "split() takes a list, or an object with a length that can be sliced, not a "
        f"{type(items).__qualname__}. Give it {hint}."
    )
