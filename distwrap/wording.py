"""Words that messages share."""

import sys
from collections.abc import Iterable, Mapping, Sequence


def unknown_name(
    what: str,
    name: object,
    known: Iterable[str],
    hints: Mapping[str, str] | None = None,
    understood: Iterable[str] = (),
) -> str:
    """Return a message that a name is unknown, which names there are, and which was probably meant.

    Args:
        what: the word for what is named.
        name: what was given.
        known: the names that there are.
        hints: a sentence for each name that people try, and that means something else or nothing here.
        understood: names that may be meant too, and are not listed.
    """
    import difflib  # for an error alone

    names = sorted(known)
    meant = _squeezed(name)
    possible = [*names, *understood]
    same = [each for each in possible if _squeezed(each) == meant]
    of_lower = {each.lower(): each for each in possible}
    near = [of_lower[each] for each in difflib.get_close_matches(str(name).lower(), of_lower, n=3)]
    near.sort(
        key=lambda other: (len(other), set(other)) != (len(str(name)), set(str(name)))
    )  # "dpp" is "ddp", not "dp"
    # A name of two letters is near to any other of three, and means something else.
    near = same + [each for each in near if len(each) > 2 or sorted(each) == sorted(str(name).lower())]
    hint = {_squeezed(each): text for each, text in (hints or {}).items()}.get(meant)
    hint = hint or (f"Did you mean {near[0]!r}?" if near else "")
    return f"unknown {what} {name!r}. {hint}{hint and ' '}Known: {', '.join(names)}."


def _squeezed(name: object) -> str:
    """Return a name without capitals, and without what stands between its words."""
    return str(name).lower().translate({ord(each): None for each in "-_ ."})


def named_ranks(numbers: Iterable[int]) -> str:
    """Put ranks into words, neighbours as a range.

    Example:
        >>> named_ranks([1]), named_ranks([0, 2]), named_ranks([0, 1, 2, 3, 7])
        ('rank 1', 'ranks 0, 2', 'ranks 0-3, 7')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [word for run in runs for word in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    return ("rank " if sum(map(len, runs)) == 1 else "ranks ") + ", ".join(words)


def as_size(count: int) -> str:
    """Put bytes into words.

    Example:
        >>> as_size(1_234_567), as_size(80_000_000_000), as_size(12)
        ('1.2 MB', '80.0 GB', '12 B')
    """
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def as_memory(host: int, device: int | None) -> str:
    """Put the bytes of a process into words, after those that it has on a device of its own.

    Example:
        >>> as_memory(10**9, None), as_memory(10**9, 8 * 10**10)
        ('1.0 GB', '80.0 GB + 1.0 GB')
    """
    return as_size(host) if device is None else f"{as_size(device)} + {as_size(host)}"


def first_names(names: Sequence[object], most: int = 3) -> str:
    """Put the first names into words, and how many more there are.

    Example:
        >>> first_names(["a", "b", "c", "d"])
        'a, b, c and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(str, names[:most]))}{more}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def print_notice(text: str) -> None:
    """Print a line on standard error, with distwrap's name before it."""
    print(f"distwrap: {text}", file=sys.stderr, flush=True)
