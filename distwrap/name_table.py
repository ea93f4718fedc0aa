"""A table of names and of what each makes: our own, what a program registers, and what installed packages bring.

A package adds its own by an entry point in the group ``distwrap.strategies`` or ``distwrap.algorithms``, and so on."""

from __future__ import annotations

import inspect
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from distwrap import entry_points
from distwrap.checks import parsed
from distwrap.errors import OptionError
from distwrap.wording import unknown_name

Factory = Callable[..., Any]
Thing = TypeVar("Thing")


class _Row(NamedTuple):
    factory: Factory | tuple[str, ...]  # or "module:name", imported when it is chosen; of each package that has one
    description: str
    defaults: dict[str, Any] = {}  # never written to


def _place(place: str, package: str) -> str:
    return place if place.startswith("distwrap.") else f"{package}.{place}"


class Registry(Generic[Thing]):
    """Table of names, and of the factory of each.

    Args:
        kind: the word for what is registered, for messages.
        members: the attributes that such a thing must have.
        plural: the word for several, which is also the name of the entry points: ``distwrap.<plural>``.
        package: where the modules of `rows` are.
        rows: our own: name, ``"module:name"`` of the factory, one line of description, and what the factory is handed.
        aliases: other spellings of names.
        former: names in other packages, each with what it became here, from when that is there.
        hints: names that people try and that are none, with a sentence for the error.
        gone: names for what is not here any more, or only in other packages, each with a sentence that says so.
        gone_options: options of what the factories make, of which the same holds.
        loose: whether names may be given in capitals, or as numbers: ``"BF16"``, ``32``.
    """

    def __init__(
        self,
        kind: str,
        members: tuple[str, ...],
        plural: str,
        package: str = "",
        rows: Iterable[tuple[str, str, str] | tuple[str, str, str, dict[str, Any]]] = (),
        *,
        aliases: Mapping[str, str] | None = None,
        former: Mapping[str, str] | None = None,
        hints: Mapping[str, str] | None = None,
        gone: Mapping[str, str] | None = None,
        gone_options: Mapping[str, str] | None = None,
        loose: bool = False,
    ) -> None:
        self._kind, self._members, self._group, self._loose = kind, members, f"distwrap.{plural}", loose
        self._rows = {name: _Row((_place(place, package),), *rest) for name, place, *rest in rows}
        self._own = set(self._rows)
        self._aliases, self._former, self._hints = dict(aliases or {}), former or {}, hints
        self._gone, self._gone_options = gone or {}, gone_options
        self._installed: dict[str, _Row] | None = None

    def register(self, name: str, factory: Factory | str, description: str = "", **defaults: Any) -> None:
        """Add a name, or replace what one stands for.

        Raises:
            OptionError: the name is not a word, or the factory cannot be called.
        """
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
            raise OptionError(f"a {self._kind} is registered under a word, as 'my_{self._kind}', not {name!r}.")
        if not callable(factory) and not isinstance(factory, str):
            raise OptionError(f"{self._kind} {name!r}: the factory must be a class or a function, not {factory!r}.")
        self._rows[name] = _Row((factory,) if isinstance(factory, str) else factory, description, defaults)
        self._own.discard(name)

    def registered(self) -> dict[str, _Row]:
        """Return what the program has registered."""
        return {name: row for name, row in self._rows.items() if name not in self._own}

    def adopt(self, rows: Mapping[str, _Row]) -> None:
        """Take over what another process has registered."""
        self._rows.update(rows)
        self._own.difference_update(rows)

    def names(self) -> list[str]:
        """Return the names: ours and the registered ones in their order, then those of installed packages."""
        return list({**self._rows, **self._of_packages()})

    def available(self) -> dict[str, str]:
        """Return the names in alphabetical order, each with its description."""
        return {name: self._row(name).description for name in sorted(self.names())}

    def name_of(self, spelling: object, also: Iterable[str] = ()) -> str:
        """Return the name that a spelling stands for.

        Args:
            spelling: the name or an alias of it.
            also: words that mean something where this is called, for the error.

        Raises:
            OptionError: there is no such name; lists the known ones and the nearest.
        """
        text = self._text(spelling)
        if text is not None:
            name = text if text in self._rows else self._aliases.get(text, text)
            if name in self._rows or name in self._of_packages():
                return name
            if text in self._gone:
                raise OptionError(f"{self._kind} {text!r} is not here: {self._gone[text]}")
        known = (*self.names(), *self._aliases, *also)
        raise OptionError(unknown_name(self._kind, spelling, known, self._hints, self._former))

    def make(self, chosen: object) -> Thing:
        """Return the thing of a name, of a name with options as ``"diloco(sync_every=64)"``, or the thing itself.

        Args:
            chosen: the name, or the thing.

        Raises:
            OptionError: there is no such name, or two packages have it, or it cannot be imported, or the options are
                wrong.
        """
        text = self._text(chosen)
        if text is None:
            if isinstance(chosen, type) or self._missing(chosen):
                thing = f"{chosen.__name__}(…), an object of the class" if isinstance(chosen, type) else "an object"
                raise OptionError(f"{self._kind} {chosen!r}: give a name, or {thing}.")
            return chosen  # type: ignore[return-value]
        spelling, options = parsed(self._kind, text)
        became, given = self._became(spelling)
        name, options = self.name_of(became), {**given, **options}
        row = self._row(name)
        factory = row.factory if callable(row.factory) else entry_points.load(f"{self._kind} {name!r}", row.factory)
        try:
            made: Thing = factory(**{**row.defaults, **options})
        except TypeError as error:
            inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if inside and not any(repr(option) in str(error) for option in options):
                raise  # a mistake in the factory itself
            taken = inspect.signature(factory).parameters
            for option in () if any(each.kind is each.VAR_KEYWORD for each in taken.values()) else options:
                if option not in taken:
                    where = f"option of {self._kind} {name!r},"
                    raise OptionError(unknown_name(where, option, taken, self._gone_options)) from None
            raise OptionError(f"{self._kind} {chosen!r}: {error}.") from None
        except OptionError as error:
            raise error if became == spelling else OptionError(f"{self._kind} {chosen!r}: {error}") from None
        if self._missing(made):
            raise OptionError(
                f"{self._kind} {name!r}: its factory has made a {type(made).__name__} without {self._missing(made)[0]}."
            )
        if became != spelling:
            made.formerly = spelling  # type: ignore[attr-defined]
        return made

    def chosen(self, value: object) -> str | Thing:
        """Return the name of one of our own things, which every rank knows, or else the thing itself.

        Raises:
            OptionError: there is no such name, or the options are wrong.
        """
        text = self._text(value)
        if (text is not None and "(" in text) or (text is None and not self._missing(value)):
            return self.make(value)
        name = self.name_of(value)
        return name if name in self._own else self.make(name)

    def _became(self, spelling: str) -> tuple[str, dict[str, Any]]:
        """Return what another package's name became, and its options; any other name as it is."""
        if spelling not in self._former or spelling in self.names():
            return spelling, {}
        name, options = parsed(self._kind, self._former[spelling])
        return (name, options) if name in self.names() else (spelling, {})

    def _text(self, spelling: object) -> str | None:
        if self._loose and isinstance(spelling, (str, numbers.Integral)) and not isinstance(spelling, bool):
            return str(spelling).lower()
        return spelling if isinstance(spelling, str) else None

    def _missing(self, thing: object) -> list[str]:
        return [member for member in self._members if not hasattr(thing, member)]

    def _row(self, name: str) -> _Row:
        return self._rows[name] if name in self._rows else self._of_packages()[name]

    def _of_packages(self) -> dict[str, _Row]:
        if self._installed is None:
            found = entry_points.of_packages(self._group).items()
            self._installed = {name: _Row(places, f"of {places[0].partition(':')[0]}") for name, places in found}
        return self._installed
