"""Strategies and algorithms by name: our own, those that a program registers, and those of installed packages.

A package adds its own by an entry point in the group ``distwrap.strategies`` or ``distwrap.algorithms``, without our
knowing. Source: https://packaging.python.org/en/latest/specifications/entry-points/.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from distwrap.errors import OptionError
from distwrap.wording import unknown_name

Factory = Callable[..., Any]


@dataclass(frozen=True)
class _Entry:
    factory: Factory | str  # or "module:name", imported when it is chosen
    description: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


class Registry:
    """Names, and what makes the thing of that name.

    Args:
        kind: what is registered, for messages.
        methods: what such a thing must have.
    """

    def __init__(self, kind: str, methods: tuple[str, ...], plural: str) -> None:
        self._kind, self._methods, self._group = kind, methods, f"distwrap.{plural}"
        self._entries: dict[str, _Entry] = {}
        self._installed: dict[str, _Entry] | None = None

    def register(self, name: str, factory: Factory | str, description: str, **defaults: Any) -> None:
        """Add a name, or replace what one stands for.

        Raises:
            OptionError: the name is no word, or the factory cannot be called.
        """
        if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
            raise OptionError(f"a {self._kind} is registered under a word, as 'my_{self._kind}', not {name!r}.")
        if not callable(factory) and not isinstance(factory, str):
            raise OptionError(f"{self._kind} {name!r}: the factory must be a class or a function, not {factory!r}.")
        self._entries[name] = _Entry(factory, description, defaults)

    def available(self) -> dict[str, str]:
        """Return the names, each with its description."""
        found = {**self._of_packages(), **self._entries}
        return {name: found[name].description for name in sorted(found)}

    def make(self, chosen: Any, also: Iterable[str] = ()) -> Any:
        """Return the thing of a name, of a name with options as ``"diloco(sync_every=64)"``, or the thing itself.

        Args:
            chosen: the name, or the thing.
            also: names that mean something where this is called, for the error.

        Raises:
            OptionError: no such name, or the options are wrong.
        """
        if not isinstance(chosen, str):
            if isinstance(chosen, type) or not all(hasattr(chosen, method) for method in self._methods):
                thing = f"{chosen.__name__}(…), an object of the class" if isinstance(chosen, type) else "an object"
                raise OptionError(f"{self._kind} {chosen!r}: give a name, or {thing}.")
            return chosen
        name, options = _parsed(self._kind, chosen)
        entry = self._entries.get(name) or self._of_packages().get(name)
        if entry is None:
            raise OptionError(unknown_name(self._kind, name, (*self.available(), *also)))
        factory = _imported(entry.factory) if isinstance(entry.factory, str) else entry.factory
        try:
            made = factory(**{**entry.defaults, **options})
        except TypeError as error:
            raise OptionError(f"{self._kind} {chosen!r}: {error}.") from None
        missing = [method for method in self._methods if not hasattr(made, method)]
        if missing:
            raise OptionError(
                f"{self._kind} {name!r}: its factory has made a {type(made).__name__} without {missing[0]}."
            )
        return made

    def _of_packages(self) -> dict[str, _Entry]:
        if self._installed is None:
            points = entry_points(group=self._group)
            self._installed = {
                point.name: _Entry(point.value, f"of {point.value.partition(':')[0]}") for point in points
            }
        return self._installed


def _imported(place: str) -> Factory:
    module, _, name = place.partition(":")
    factory: Factory = getattr(importlib.import_module(module), name)
    return factory


def _parsed(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """Split a name and its options, which are plain values.

    Example:
        >>> _parsed("algorithm", "diloco(sync_every=64, compression='8bit')")
        ('diloco', {'sync_every': 64, 'compression': '8bit'})
    """
    name, opened, arguments = text.strip().partition("(")
    if not opened:
        return name, {}
    try:
        call = ast.parse(f"options({arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(arguments)
        return name.strip(), {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    except (SyntaxError, ValueError):
        raise OptionError(
            f"{kind} {text!r}: write it as a name, or as name(option=value, …) with plain values."
        ) from None


strategies = Registry("strategy", ("prepare_model", "prepare_optimizer"), "strategies")
algorithms = Registry("algorithm", ("attach",), "algorithms")

for _name, _class, _description in (
    ("ddp", "ddp:DDPStrategy", "one process a device, gradients averaged: torch's DistributedDataParallel"),
    ("ddp2", "ddp2:DDP2Strategy", "one process a node over all its devices, gradients averaged across nodes"),
    ("dp", "dp:DPStrategy", "one process over all its devices, in threads: torch's DataParallel"),
    ("single", "single:SingleStrategy", "one process, one device"),
    ("bagua", "bagua:BaguaStrategy", "DDP with an algorithm under Bagua's name: algorithm='gradient_allreduce', …"),
):
    strategies.register(_name, f"distwrap.strategies.{_class}", _description)

for _name, _class, _description in (
    ("allreduce", "allreduce:AllReduce", "gradients in full"),
    ("fp16", "allreduce:FP16", "gradients in float16: half the bytes"),
    ("bf16", "allreduce:BF16", "gradients in bfloat16: half the bytes"),
    ("bytegrad", "bytegrad:ByteGrad", "gradients in 8 bits: a quarter of the bytes"),
    ("powersgd", "powersgd:PowerSGD", "gradients as thin matrices, with error feedback"),
    ("topk", "topk:TopK", "the largest gradients, with error feedback"),
    ("qadam", "qadam:QAdam", "Adam's momentum in 8 bits or 1, after a warm-up"),
    ("decentralized", "decentralized:Decentralized", "weights averaged with peers, during the step"),
    (
        "low_precision_decentralized",
        "low_precision:LowPrecisionDecentralized",
        "weights averaged with two neighbours, in 8 bits",
    ),
    ("async", "asynchronous:AsyncAveraging", "weights averaged by the clock, in the background"),
    ("local_sgd", "local_sgd:LocalSGD", "weights averaged every few steps"),
    ("diloco", "diloco:DiLoCo", "an outer step with momentum every few dozen steps"),
):
    algorithms.register(_name, f"distwrap.comm.{_class}", _description)


def register_strategy(name: str, factory: Factory | str, description: str = "", **defaults: Any) -> None:
    """Make a strategy known by a name, for ``@distributed(strategy=name)`` and ``wrap_model(strategy=name)``.

    Args:
        name: a word. One that is known already gets the new meaning.
        factory: a class or function that makes the `Strategy`; or ``"module:name"``, imported when it is chosen.
        description: one line, for `available_strategies`.
        **defaults: handed to the factory.

    Raises:
        OptionError: the name is no word, or the factory cannot be called.

    Example:
        >>> register_strategy("ddp_static", "distwrap.strategies.ddp:DDPStrategy", "DDP, static", static_graph=True)
        >>> available_strategies()["ddp_static"]
        'DDP, static'
    """
    strategies.register(name, factory, description, **defaults)


def available_strategies() -> dict[str, str]:
    """Return the strategies' names, each with its description: ours, registered ones, and those of installed packages.

    Example:
        >>> "ddp" in available_strategies()
        True
    """
    return strategies.available()


def register_algorithm(name: str, factory: Factory | str, description: str = "", **defaults: Any) -> None:
    """Make an algorithm of exchange known by a name, for ``comm=name``.

    Args:
        name: a word. One that is known already gets the new meaning.
        factory: a class or function that makes the `distwrap.comm.Algorithm`; or ``"module:name"``.
        description: one line, for `available_algorithms`.
        **defaults: handed to the factory.

    Raises:
        OptionError: the name is no word, or the factory cannot be called.

    Example:
        >>> register_algorithm("rare", "distwrap.comm.local_sgd:LocalSGD", "a mean now and then", sync_every=100)
        >>> available_algorithms()["rare"]
        'a mean now and then'
    """
    algorithms.register(name, factory, description, **defaults)


def available_algorithms() -> dict[str, str]:
    """Return the names of the algorithms for ``comm=``, each with its description.

    Example:
        >>> "bytegrad" in available_algorithms()
        True
    """
    return algorithms.available()
