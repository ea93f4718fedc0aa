"""The options of ``@distributed``: names, aliases, environment overrides, checks. Nothing here starts anything."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from distwrap.errors import OptionError
from distwrap.registry import algorithms, strategies
from distwrap.wording import unknown_name

Precision = Literal["32", "bf16", "bf16-true", "fp16"]
Launcher = Literal["auto", "forkserver", "fork", "spawn", "script", "elastic", "external"]
Returns = Literal["rank0", "all"]

LAUNCHERS: tuple[str, ...] = get_args(Launcher)

# Spellings of ours, of Lightning ("ddp_notebook") and of people in a hurry: strategy and launcher in one word.
_STRATEGY_ALIASES: dict[str, tuple[str, Launcher]] = {
    "ddp_spawn": ("ddp", "spawn"),
    "ddp_fork": ("ddp", "fork"),
    "ddp_forkserver": ("ddp", "forkserver"),
    "ddp_script": ("ddp", "script"),
    "ddp_notebook": ("ddp", "forkserver"),
    "spawn": ("ddp", "spawn"),
    "fork": ("ddp", "fork"),
    "forkserver": ("ddp", "forkserver"),
}

# Spellings of Lightning ("16-mixed", 32) and of Accelerate ("no").
_PRECISION_ALIASES: dict[str, Precision] = {
    "32": "32",
    "32-true": "32",
    "fp32": "32",
    "float32": "32",
    "no": "32",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "bfloat16": "bf16",
    "bf16-true": "bf16-true",
    "fp16": "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
    "float16": "fp16",
}

_ENVIRONMENT = {
    "DISTWRAP_STRATEGY": "strategy",
    "DISTWRAP_LAUNCHER": "launcher",
    "DISTWRAP_NPROCS": "nprocs",
    "DISTWRAP_BACKEND": "backend",
    "DISTWRAP_PRECISION": "precision",
    "DISTWRAP_COMM": "comm",
    "DISTWRAP_TIMEOUT": "timeout",
    "DISTWRAP_NNODES": "nnodes",
    "DISTWRAP_NODE_RANK": "node_rank",
    "DISTWRAP_RDZV_ENDPOINT": "rdzv_endpoint",
    "DISTWRAP_MAX_RESTARTS": "max_restarts",
    "DISTWRAP_LOG_DIR": "log_dir",
}

_SWITCHES = ("DISTWRAP_DISABLE", "DISTWRAP_QUIET")
_OURS = ("DISTWRAP_STORE", "DISTWRAP_LAUNCHED", "DISTWRAP_SCRIPT_FD")  # between a launch and its ranks


@dataclass(frozen=True)
class Options:
    """Checked options. Build them with `Options().updated(…)`, which checks and resolves aliases.

    See `distwrap.distributed` for what each one means.
    """

    strategy: Any = "ddp"
    nprocs: int | Literal["auto"] = "auto"
    nnodes: int | str = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    launcher: Launcher = "auto"
    backend: str = "auto"
    precision: Precision = "32"
    comm: Any = None
    seed: int | None = None
    timeout: float = 600.0
    max_restarts: int = 0
    returns: Returns = "rank0"
    retrofit: bool = False
    log_dir: str | None = None

    def updated(self, given: Mapping[str, Any], where: str = "@distributed") -> Options:
        """Return these options with `given` over them.

        Args:
            given: names and values.
            where: who gave them, for the error.

        Raises:
            OptionError: a name or a value that is wrong, or two that contradict each other.
        """
        known = {field.name for field in fields(self)}
        checked: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise OptionError(f"{where}: {unknown_name('option', name, known)}")
            try:
                checked[name] = _CHECKS[name](value)
            except OptionError as error:
                raise OptionError(f"{where}: {error}") from None
        strategy = checked.get("strategy")
        if isinstance(strategy, str) and strategy in _STRATEGY_ALIASES:
            checked["strategy"], implied = _STRATEGY_ALIASES[strategy]
            if checked.get("launcher", implied) not in ("auto", implied):
                raise OptionError(
                    f"{where}: strategy={strategy!r} means launcher={implied!r}, but launcher={checked['launcher']!r} "
                    f"was given too. Say strategy='ddp' with the launcher you want."
                )
            checked["launcher"] = implied
        result = replace(self, **checked)
        # A strategy given alone overrides an earlier number; a number given later is not ignored.
        if result.strategy == "single" and checked.get("nprocs", 1) not in (1, "auto"):
            raise OptionError(f"{where}: strategy='single' is one process, but nprocs={result.nprocs} was given too.")
        own = getattr(result.strategy, "backend", None)
        if own is not None and result.backend not in ("auto", own):
            raise OptionError(
                f"{where}: backend={result.backend!r}, but the strategy {result.strategy!r} brings its own, {own!r}."
            )
        return result

    def with_environment(self, env: Mapping[str, str]) -> Options:
        """Return these options with the ``DISTWRAP_…`` variables over them.

        Raises:
            OptionError: a value is wrong, or a variable is none of ours, as one that is misspelt.
        """
        for variable in env:
            if variable.startswith("DISTWRAP_") and variable not in (*_ENVIRONMENT, *_SWITCHES, *_OURS):
                raise OptionError(unknown_name("variable", variable, (*_ENVIRONMENT, *_SWITCHES)))
        found = {variable: name for variable, name in _ENVIRONMENT.items() if env.get(variable)}
        given = {name: _from_text(variable, name, env[variable]) for variable, name in found.items()}
        for variable, name in found.items():
            if name != "nprocs" or "strategy" not in given:  # else the two are to be judged together
                self.updated({name: given[name]}, where=variable)
        return self.updated(given, where=" and ".join(found))


def switched_on(env: Mapping[str, str], variable: str) -> bool:
    """Read a yes-or-no variable strictly.

    Raises:
        OptionError: neither yes nor no; lists what is allowed.
    """
    text = env.get(variable, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise OptionError(f"{variable}={env[variable]!r}: say 1, true, yes or on; or 0, false, no or off.")


def _from_text(variable: str, name: str, text: str) -> object:
    if (name == "nprocs" and text != "auto") or name in ("node_rank", "max_restarts"):
        try:
            return int(text)
        except ValueError:
            auto = "'auto' or " if name == "nprocs" else ""
            raise OptionError(f"{variable}={text!r}: it must be {auto}a whole number.") from None
    if name == "timeout":
        try:
            return float(text)
        except ValueError:
            raise OptionError(f"{variable}={text!r}: it must be a number of seconds.") from None
    return text


def _check_strategy(value: object) -> Any:
    if isinstance(value, str) and (value in _STRATEGY_ALIASES or value in ("ddp", "dp", "single")):
        return value  # nothing in it can be wrong, and it need not be imported yet
    return strategies.make(value, also=_STRATEGY_ALIASES)


def _check_comm(value: object) -> Any:
    return None if value is None else algorithms.make(value)


def _check_nprocs(value: object) -> int | str:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise OptionError(f"nprocs={value!r}: it must be 'auto' or a whole number of at least 1.")
    return int(value)


def _check_nnodes(value: object) -> int | str:
    text = str(value) if not isinstance(value, bool) else ""
    fewest, colon, most = text.partition(":")
    if not fewest.isdigit() or (colon and not most.isdigit()) or not 1 <= int(fewest) <= int(most or fewest):
        raise OptionError(f"nnodes={value!r}: it must be a number of machines, or 'MIN:MAX', as '1:4'.")
    return int(fewest) if int(fewest) == int(most or fewest) else text


def _check_node_rank(value: object) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0):
        raise OptionError(f"node_rank={value!r}: it must be None or a whole number from 0.")
    return None if value is None else int(value)


def _check_rdzv_endpoint(value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise OptionError(f"rdzv_endpoint={value!r}: it must be None or 'host:port', as 'node1:29400'.")
    return None if value is None else value.strip()


def _check_max_restarts(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise OptionError(f"max_restarts={value!r}: it must be a whole number from 0.")
    return int(value)


def _check_launcher(value: object) -> str:
    if value not in LAUNCHERS:
        raise OptionError(unknown_name("launcher", value, LAUNCHERS))
    return str(value)


def _check_backend(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(f"backend={value!r}: it must be 'auto' or a name that torch.distributed knows, as 'gloo'.")
    return value


def _check_precision(value: object) -> Precision:
    name = str(value).lower() if not isinstance(value, bool) else repr(value)
    if name not in _PRECISION_ALIASES:
        raise OptionError(unknown_name("precision", value, _PRECISION_ALIASES))
    return _PRECISION_ALIASES[name]


def _check_seed(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) < 2**63:
        raise OptionError(f"seed={value!r}: it must be None or a whole number from 0 to 2**63 - 1.")
    return int(value)


def _check_timeout(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise OptionError(f"timeout={value!r}: it must be a positive number of seconds.")
    return float(value)


def _check_returns(value: object) -> str:
    if value not in get_args(Returns):
        raise OptionError(unknown_name("value for returns", value, get_args(Returns)))
    return str(value)


def _check_retrofit(value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"retrofit={value!r}: it must be True or False.")
    return value


def _check_log_dir(value: object) -> str | None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise OptionError(f"log_dir={value!r}: it must be None or the path of a folder.")
    return None if value is None else str(os.fspath(value))


_CHECKS: dict[str, Any] = {
    "strategy": _check_strategy,
    "nprocs": _check_nprocs,
    "nnodes": _check_nnodes,
    "node_rank": _check_node_rank,
    "rdzv_endpoint": _check_rdzv_endpoint,
    "max_restarts": _check_max_restarts,
    "launcher": _check_launcher,
    "backend": _check_backend,
    "precision": _check_precision,
    "comm": _check_comm,
    "seed": _check_seed,
    "timeout": _check_timeout,
    "returns": _check_returns,
    "retrofit": _check_retrofit,
    "log_dir": _check_log_dir,
}


def check_precision(value: object) -> Precision:
    """Resolve a precision's spelling; raises OptionError with the known ones."""
    return _check_precision(value)


def check_strategy(value: object) -> Any:
    """Resolve a strategy's name, or take the object; raises OptionError with the known ones and the nearest."""
    chosen = _check_strategy(value)
    return _STRATEGY_ALIASES[chosen][0] if isinstance(chosen, str) and chosen in _STRATEGY_ALIASES else chosen


def check_comm(value: object) -> Any:
    """Resolve an algorithm's name, or take the object; raises OptionError with the known ones and the nearest."""
    return _check_comm(value)
