"""Tables of strategies, algorithms and the like: our own, those that a program registers, those of installed packages.

A package adds its own by an entry point in the group ``distwrap.strategies`` or ``distwrap.algorithms``, and so on."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from distwrap import entry_points
from distwrap.checks import parsed
from distwrap.errors import OptionError
from distwrap.former_names import BECAME, HINTS, LAUNCHER_OF_STRATEGY
from distwrap.wording import unknown_name

if TYPE_CHECKING:
    from distwrap.comm.base import Algorithm
    from distwrap.launch.base import Launcher
    from distwrap.precision.base import Precision
    from distwrap.strategies.base import Strategy

Factory = Callable[..., Any]
Thing = TypeVar("Thing")


class _Row(NamedTuple):
    factory: Factory | tuple[str, ...]  # or "module:name", imported when it is chosen; of each package that has one
    description: str
    defaults: dict[str, Any] = {}  # never written to


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
        loose: bool = False,
    ) -> None:
        self._kind, self._members, self._group, self._loose = kind, members, f"distwrap.{plural}", loose
        self._rows = {name: _Row((f"{package}.{place}",), *rest) for name, place, *rest in rows}
        self._own = set(self._rows)
        self._aliases, self._former, self._hints = dict(aliases or {}), former or {}, hints
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
        raise OptionError(unknown_name(self._kind, spelling, (*self.names(), *self._aliases, *also), self._hints))

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
            raise OptionError(f"{self._kind} {chosen!r}: {error}.") from None
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


strategies: Registry[Strategy] = Registry(
    "strategy",
    ("prepare_model", "prepare_optimizer"),
    "strategies",
    "distwrap.strategies",
    (
        ("ddp", "ddp:DDPStrategy", "one process a device, gradients averaged: torch's DistributedDataParallel"),
        ("ddp2", "ddp2:DDP2Strategy", "one process a node over all its devices, gradients averaged across nodes"),
        ("dp", "dp:DPStrategy", "one process over all its devices, in threads: torch's DataParallel"),
        ("single", "single:SingleStrategy", "one process, one device"),
        ("zero1", "zero:ZeroStrategy", "ddp with the optimizer's state divided over the ranks", {"stage": 1}),
        ("zero2", "zero:ZeroStrategy", "zero1, and each rank keeps its share of the gradients alone", {"stage": 2}),
        ("fsdp", "fsdp:FSDPStrategy", "each rank holds a share of every weight: torch's FSDP2"),
        ("hsdp", "fsdp:FSDPStrategy", "each node holds a copy, divided over its ranks: FSDP2", {"shard": "node"}),
        ("pipeline", "pipeline:PipelineStrategy", "the blocks of a model in stages on the ranks, over microbatches"),
        ("auto", "auto:AutoStrategy", "the plainest of ddp, zero1, zero2, hsdp and fsdp that fits, by an estimate"),
        ("bagua", "bagua:BaguaStrategy", "DDP with an algorithm under Bagua's name: algorithm='gradient_allreduce', …"),
    ),
    aliases=dict.fromkeys(LAUNCHER_OF_STRATEGY.keys() - BECAME, "ddp"),
    former=BECAME,
    hints=HINTS,
)

algorithms: Registry[Algorithm] = Registry(
    "algorithm",
    ("attach",),
    "algorithms",
    "distwrap.comm",
    (
        ("allreduce", "allreduce:AllReduce", "gradients in full"),
        ("fp16", "allreduce:FP16", "gradients in float16: half the bytes"),
        ("bf16", "allreduce:BF16", "gradients in bfloat16: half the bytes"),
        ("bytegrad", "allreduce:ByteGrad", "gradients in 8 bits: a quarter of the bytes"),
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
    ),
)


precisions: Registry[Precision] = Registry(
    "precision",
    ("weights", "inputs", "context", "outputs"),
    "precisions",
    "distwrap.precision",
    (
        ("32", "base:FullPrecision", "float32, or whatever type the model has"),
        ("bf16", "bf16:MixedBF16", "autocast to bfloat16"),
        ("bf16-true", "bf16:TrueBF16", "weights and inputs in bfloat16"),
        ("fp16", "fp16:MixedFP16", "autocast to float16, with scaled losses"),
    ),
    # Spellings of Lightning ("16-mixed", 32) and of Accelerate ("no").
    aliases={
        **dict.fromkeys(("32-true", "fp32", "float32", "no"), "32"),
        **dict.fromkeys(("bf16-mixed", "bfloat16"), "bf16"),
        **dict.fromkeys(("16", "16-mixed", "float16"), "fp16"),
    },
    loose=True,
)


launchers: Registry[Launcher] = Registry(
    "launcher",
    ("count", "check", "plan", "run", "bring_home"),
    "launchers",
    "distwrap.launch",
    (
        ("auto", "auto:fastest", "fork where that is safe, else forkserver"),
        ("fork", "fork:ForkLauncher", "copies of this process"),
        ("forkserver", "forkserver:ForkServerLauncher", "forks of a warm server, which has imported torch"),
        ("spawn", "spawn:SpawnLauncher", "fresh interpreters"),
        ("script", "script:ScriptLauncher", "this command line again for the other ranks; this process is rank 0"),
        ("elastic", "elastic:ElasticLauncher", "torch elastic: ranks start again, and nodes come and go"),
        ("external", "external:refuse", "none: an outer launcher must have started the ranks"),
    ),
    hints=dict.fromkeys(
        ("torchrun", "slurm", "srun", "mpi", "mpirun"),
        "Ranks that torchrun, srun or mpirun has started are found by themselves: leave launcher at 'auto'.",
    ),
)


REGISTRIES: tuple[Registry[Any], ...] = (strategies, algorithms, precisions, launchers)


def register_strategy(name: str, factory: Factory | str, description: str = "", **defaults: Any) -> None:
    """Make a strategy known by a name, for ``@distributed(strategy=name)`` and ``wrap_model(strategy=name)``.

    Args:
        name: a word. One that is known already gets the new meaning.
        factory: a class or function that makes the `Strategy`; or ``"module:name"``, imported when it is chosen.
        description: one line, for `available_strategies`.
        **defaults: handed to the factory.

    Raises:
        OptionError: the name is not a word, or the factory cannot be called.

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
        OptionError: the name is not a word, or the factory cannot be called.

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


def register_precision(name: str, factory: Factory | str, description: str = "", **defaults: Any) -> None:
    """Make a precision known by a name, for ``@distributed(precision=name)`` and ``wrap_model(precision=name)``.

    Args:
        name: a word. One that is known already gets the new meaning.
        factory: a class or function that makes the `distwrap.precision.Precision`; or ``"module:name"``.
        description: one line, for `available_precisions`.
        **defaults: handed to the factory.

    Raises:
        OptionError: the name is not a word, or the factory cannot be called.

    Example:
        >>> register_precision("brain", "distwrap.precision.bf16:MixedBF16", "autocast to bfloat16")
        >>> available_precisions()["brain"]
        'autocast to bfloat16'
    """
    precisions.register(name, factory, description, **defaults)


def available_precisions() -> dict[str, str]:
    """Return the names of the precisions, each with its description.

    Example:
        >>> "bf16" in available_precisions()
        True
    """
    return precisions.available()


def register_launcher(name: str, factory: Factory | str, description: str = "", **defaults: Any) -> None:
    """Make a launcher known by a name, for ``@distributed(launcher=name)``.

    Args:
        name: a word. One that is known already gets the new meaning.
        factory: a class or function that makes the `distwrap.launch.base.Launcher`; or ``"module:name"``, imported
            when it is chosen.
        description: one line, for `available_launchers`.
        **defaults: handed to the factory.

    Raises:
        OptionError: the name is no word, or the factory cannot be called.

    Example:
        >>> register_launcher("fresh", "distwrap.launch.spawn:SpawnLauncher", "spawn by another name")
        >>> available_launchers()["fresh"]
        'spawn by another name'
    """
    launchers.register(name, factory, description, **defaults)


def available_launchers() -> dict[str, str]:
    """Return the launchers' names, each with its description: ours, registered ones, and those of installed packages.

    Example:
        >>> "forkserver" in available_launchers()
        True
    """
    return launchers.available()
