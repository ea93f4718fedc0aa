"""The options of ``@distributed``, each declared once: default, check, environment variable, line of documentation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from distwrap import frames
from distwrap.checks import AT_LEAST_ONE, SECONDS, SEED, Check, either, one_of, whole
from distwrap.errors import OptionError
from distwrap.former_names import BECAME, LAUNCHER_OF_STRATEGY
from distwrap.former_options import ENVIRONMENT_PREFIX, for_option, for_variable
from distwrap.registry import algorithms, launchers, precisions, strategies
from distwrap.wording import unknown_name

if TYPE_CHECKING:
    from distwrap.protocols import Algorithm, Launcher, Precision, Strategy

T = TypeVar("T")
Returns = Literal["rank0", "all"]

QUIET = "DISTWRAP_QUIET"
SWITCHES = {
    "DISTWRAP_DISABLE": "run the function in this process",
    QUIET: "silence the line at the start and notices during the run; reports and errors are still printed",
    "DISTWRAP_TRUST_NETWORK": "unpickle objects of other ranks also where no secret tells who sent them",
}
TEST_RANKS = "DISTWRAP_TEST_RANKS"
SIMULATE = "DISTWRAP_SIMULATE"
NUMBERS = {SIMULATE: "simulate so many ranks in this process, whatever the code says: launcher='simulate'"}
CHOICES = {
    frames.VARIABLE: ("full", "show the frames of distwrap in tracebacks too"),
    TEST_RANKS: ("simulate", "let `distwrap.testing.run_ranks` simulate its ranks"),
}
SECRET_FILE = "DISTWRAP_SECRET_FILE"
WAIT_NOTICE = "DISTWRAP_WAIT_NOTICE"
SECONDS_OF = {WAIT_NOTICE: "seconds after which a line says for whom ranks wait, by default 30; 0 is never"}
PATHS = {SECRET_FILE: "a file that all nodes have, and no other user, so that ranks know each other"}


class Text(NamedTuple):
    """Reading of an option from its environment variable."""

    read: Callable[[str], object]
    words: str  # what the text must be, for the error


WORD = Text(str, "a word")
WHOLE = Text(int, "a whole number")
AUTO_OR_WHOLE = Text(lambda text: text if text == "auto" else int(text), "'auto' or a whole number")
REPORT = Text(
    lambda text: text if text.endswith(".json") else _as_switch(text),
    "1, true, yes, on, their opposites, or a path that ends in .json",
)
NUMBER = Text(float, "a number of seconds")
YES_OR_NO = Text(lambda text: _as_switch(text), "1, true, yes, on, or their opposites")


class Declaration(NamedTuple):
    """Check, documentation and environment variable of an option."""

    check: Callable[[str, Any], Any]
    line: str
    text: Text | None


def option(default: T, check: Callable[[str, Any], Any], line: str, text: Text | None = None) -> T:
    """Declare an option: its default, its check and its documentation.

    Args:
        default: its value where the user gives none.
        check: takes the name and the value, and returns the value or raises OptionError.
        line: one line of documentation.
        text: how the option is read from its variable ``DISTWRAP_<NAME>``; ``None`` where it has none.
    """
    return field(default=default, metadata={"declaration": Declaration(check, line, text)})


def _strategy(_: str, value: object) -> Any:
    if isinstance(value, str) and (value in LAUNCHER_OF_STRATEGY or value in ("ddp", "dp", "single")):
        return value  # nothing in it can be wrong, and it need not be imported yet
    name = value.partition("(")[0].strip() if isinstance(value, str) else ""
    if name in LAUNCHER_OF_STRATEGY and name not in strategies.names():
        raise OptionError(
            f"strategy {value!r}: {name!r} stands for a launcher too, and takes no options. Say "
            f"strategy='{BECAME.get(name, 'ddp').partition('(')[0]}(…)' with launcher={LAUNCHER_OF_STRATEGY[name]!r}."
        )
    return strategies.make(value)


def _launcher(_: str, value: object) -> Any:
    """Return a name, one with options, of which a call makes a launcher of its own, or the launcher itself."""
    if isinstance(value, str) and "(" not in value:
        return launchers.name_of(value)
    made = launchers.make(value)
    return value if isinstance(value, str) else made


def _nodes(value: object) -> bool:
    fewest, colon, most = str(value).partition(":")
    numbers = fewest.isdigit() and (not colon or most.isdigit()) and not isinstance(value, bool)
    return numbers and 1 <= int(fewest) <= int(most or fewest)


def _plain_nodes(value: object) -> int | str:
    fewest, _, most = str(value).partition(":")
    return int(fewest) if int(fewest) == int(most or fewest) else str(value)


def _comm(_: str, value: object) -> Algorithm | None:
    return None if value is None else algorithms.make(value)


def _known(look_up: Callable[[object], T]) -> Callable[[str, object], T]:
    """Return the check for what a table of names knows."""
    return lambda _, value: look_up(value)


_NODES = Check("a number of nodes, or 'MIN:MAX', as '1:4'", _nodes, _plain_nodes)
_ENDPOINT = Check(
    "'host:port', as 'node1:29400'", lambda value: isinstance(value, str) and bool(value.strip()), str.strip
)
_BACKEND = Check(
    "'auto' or a name that torch.distributed knows, as 'gloo'", lambda value: isinstance(value, str) and bool(value)
)
_SWITCH = Check("True or False", lambda value: isinstance(value, bool))
_REPORT = Check(
    "True, False, or the path of a file that ends in .json",
    lambda value: isinstance(value, bool) or (isinstance(value, (str, os.PathLike)) and str(value).endswith(".json")),
    lambda value: value if isinstance(value, bool) else str(os.fspath(value)),
)
_FOLDER = Check(
    "the path of a folder", lambda value: isinstance(value, (str, os.PathLike)), lambda value: str(os.fspath(value))
)


@dataclass(frozen=True)
class Options:
    """Checked options. Build them with `Options().updated(…)`, which checks and resolves aliases.

    See `distwrap.distributed` for what each one means.
    """

    strategy: str | Strategy = option("ddp", _strategy, "how the model is replicated", WORD)
    nprocs: int | Literal["auto"] = option(
        "auto", either("auto", AT_LEAST_ONE), "processes on this node", AUTO_OR_WHOLE
    )
    nnodes: int | str = option(1, _NODES, "nodes, which all run the same command", WORD)
    node_rank: int | None = option(None, either(None, whole(0)), "which of the nodes this one is", WHOLE)
    rdzv_endpoint: str | None = option(None, either(None, _ENDPOINT), "where the nodes meet", WORD)
    launcher: str | Launcher = option("auto", _launcher, "how the processes are started", WORD)
    backend: str = option("auto", _BACKEND, "the backend of the process group", WORD)
    precision: str | Precision = option("32", _known(precisions.chosen), "the precision of computation", WORD)
    comm: Algorithm | None = option(None, _comm, "how wrapped models exchange gradients or weights", WORD)
    share_devices: bool = option(False, _SWITCH, "whether ranks may share an accelerator, to try them out", YES_OR_NO)
    seed: int | None = option(None, either(None, SEED), "the seed of all ranks", WHOLE)
    timeout: float = option(600.0, SECONDS, "seconds for a collective", NUMBER)
    max_restarts: int = option(0, whole(0), "restarts after a failure", WHOLE)
    returns: Returns = option("rank0", one_of("value for returns", get_args(Returns)), "whose values a call returns")
    retrofit: bool = option(False, _SWITCH, "whether models and loaders among the arguments are wrapped")
    report: bool | str = option(False, _REPORT, "whether to tell where the time goes; a path gets the figures", REPORT)
    log_dir: str | None = option(None, either(None, _FOLDER), "the folder for what each rank prints", WORD)

    def updated(self, given: Mapping[str, Any], where: str = "@distributed") -> Options:
        """Return these options with `given` over them.

        Args:
            given: names and values.
            where: who gave them, for the error.

        Raises:
            OptionError: a name or a value that is wrong, or two that contradict each other.
        """
        checked: dict[str, Any] = {}
        for name, value in given.items():
            if name not in DECLARATIONS:
                hint = for_option(name, value)
                raise OptionError(f"{where}: {unknown_name('option', name, DECLARATIONS, {name: hint})}")
            try:
                checked[name] = DECLARATIONS[name].check(name, value)
            except OptionError as error:
                raise OptionError(f"{where}: {error}") from error.__cause__  # of a broken plug-in
        strategy = checked.get("strategy")
        if isinstance(strategy, str) and strategy in LAUNCHER_OF_STRATEGY:
            implied = LAUNCHER_OF_STRATEGY[strategy]
            checked["strategy"] = strategies.make(strategy) if strategy in BECAME else strategies.name_of(strategy)
            if checked.get("launcher", implied) not in ("auto", implied):
                raise OptionError(
                    f"{where}: strategy={strategy!r} means launcher={implied!r}, but launcher={checked['launcher']!r} "
                    f"was given too. Say strategy={BECAME.get(strategy, 'ddp')!r} with the launcher you want."
                )
            checked["launcher"] = implied
        result = replace(self, **checked)
        # A strategy given alone overrides an earlier number; a number given later is not ignored.
        is_one = result.strategy in ("single", "dp") or getattr(result.strategy, "launches", "") == "one"
        if is_one and checked.get("nprocs", 1) not in (1, "auto"):
            raise OptionError(
                f"{where}: strategy={result.strategy!r} runs in one process, but nprocs={result.nprocs} was given too."
            )
        own = getattr(result.strategy, "backend", None)
        if own is not None and result.backend not in ("auto", own):
            raise OptionError(
                f"{where}: backend={result.backend!r}, but the strategy {result.strategy!r} brings its own, {own!r}."
            )
        return result

    def with_environment(self, env: Mapping[str, str]) -> Options:
        """Return these options with the ``DISTWRAP_…`` variables over them.

        Raises:
            OptionError: a value is wrong, or a variable has no meaning here, as one that is misspelt.
        """
        from distwrap.environments.distwrap_environment import LAUNCHER, SCRIPT, STORE  # not needed to decorate

        for variable in env:
            ours = variable.startswith(ENVIRONMENT_PREFIX) and variable not in (
                *KNOWN_VARIABLES,
                STORE,
                LAUNCHER,
                SCRIPT,
            )
            if ours or _is_misspelt(variable, KNOWN_VARIABLES):
                hint = for_variable(variable, env[variable], VARIABLES) or _without_variable(variable)
                raise OptionError(unknown_name("variable", variable, KNOWN_VARIABLES, {variable: hint}))
        check_words(env)
        found = {variable: name for variable, name in VARIABLES.items() if env.get(variable)}
        given = {name: from_text(variable, name, env[variable]) for variable, name in found.items()}
        for variable, name in found.items():
            if name != "nprocs" or "strategy" not in given:  # else the two are to be judged together
                self.updated({name: given[name]}, where=variable)
        return self.updated(given, where=" and ".join(found))

    def simulated(self, env: Mapping[str, str]) -> Options:
        """Return these options for simulated ranks, where ``DISTWRAP_SIMULATE`` asks for them whatever the code says.

        Raises:
            OptionError: it is no number of ranks.
        """
        if not env.get(SIMULATE):
            return self
        ranks = from_text(SIMULATE, "nprocs", env[SIMULATE])
        return self.updated({"launcher": "simulate", "nprocs": ranks}, where=SIMULATE)


DECLARATIONS: dict[str, Declaration] = {each.name: each.metadata["declaration"] for each in fields(Options)}

# The environment variables that override an option.
VARIABLES = {f"DISTWRAP_{name.upper()}": name for name, declared in DECLARATIONS.items() if declared.text is not None}
KNOWN_VARIABLES = (*VARIABLES, *SWITCHES, *CHOICES, *SECONDS_OF, *PATHS, *NUMBERS)


def _is_misspelt(variable: str, known: Iterable[str]) -> bool:
    """Return whether a variable that is not ours was meant as one, as DISWRAP_NPROCS or distwrap_nprocs."""
    text = variable.upper()
    if not ("WRAP_" in text or text.startswith("DI")) or variable.startswith(ENVIRONMENT_PREFIX):
        return False  # at once: there may be hundreds
    import difflib  # for an error alone

    return bool(difflib.get_close_matches(text, known, n=1, cutoff=0.92))


def _without_variable(variable: str) -> str:
    """Return what to write where an option has no variable; empty of a name that is no option."""
    name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
    if name not in DECLARATIONS or DECLARATIONS[name].text is not None:
        return ""
    return f"The option {name} has no variable: write @distributed({name}=…) or .options({name}=…)."


def switched_on(env: Mapping[str, str], variable: str) -> bool:
    """Return whether a yes-or-no variable says yes.

    Raises:
        OptionError: it says neither yes nor no; lists what is allowed.
    """
    try:
        return _as_switch(env.get(variable, ""))
    except ValueError:
        raise OptionError(f"{variable}={env[variable]!r}: say 1, true, yes or on; or 0, false, no or off.") from None


def check_words(env: Mapping[str, str]) -> None:
    """Refuse a wrong word in a variable that is no option's.

    Raises:
        OptionError: lists what is allowed.
    """
    for switch in SWITCHES:
        switched_on(env, switch)
    notice_seconds(env)
    if frames.word_of(env) not in frames.WORDS:
        raise OptionError(
            f"{frames.VARIABLE}={env[frames.VARIABLE]!r}: say full or short; without the variable it is short."
        )


def notice_seconds(env: Mapping[str, str], default: float = 30.0) -> float:
    """Return after how many seconds a line says that ranks wait; 0 is never.

    Args:
        env: variables, which may say so.
        default: where they do not.

    Raises:
        OptionError: what they say is no number of seconds.
    """
    text = env.get(WAIT_NOTICE, "").strip()
    with suppress(ValueError):
        seconds = float(text or default)
        if 0 <= seconds < float("inf"):
            return seconds
    raise OptionError(f"{WAIT_NOTICE}={text!r}: it must be a number of seconds, or 0 for never.")


def _as_switch(text: str) -> bool:
    """Return whether a text says yes.

    Raises:
        ValueError: it says neither yes nor no.
    """
    word = text.strip().lower()
    if word in ("", "0", "false", "no", "off"):
        return False
    if word in ("1", "true", "yes", "on"):
        return True
    raise ValueError(text)


def from_text(variable: str, name: str, text: str) -> object:
    """Return the value of an option out of a text, of which an error says where it stands.

    Raises:
        OptionError: it is none.
    """
    how = DECLARATIONS[name].text
    assert how is not None, name
    try:
        return how.read(text)
    except ValueError:
        raise OptionError(f"{variable}={text!r}: it must be {how.words}.") from None
