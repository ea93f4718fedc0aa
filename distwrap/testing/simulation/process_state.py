"""What a process has of its own, and threads of one process share: put away while another rank has its turn."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType
from typing import Any

import torch

from distwrap._internals.python import module_locks, table_of_variables
from distwrap._internals.torch_simulation import group_tables, hook_tables
from distwrap.group import signing, world
from distwrap.network import rendezvous
from distwrap.seeding import RandomState
from distwrap.supervision.stacks import is_users

_ALSO_OWN = ("__main__", "hydra", "omegaconf")  # libraries that refuse to begin twice in a process
_INSTALLED = ("site-packages", "dist-packages")  # also those of a user, and of an interpreter around this one
_ENVIRON: Any = os.environb if os.supports_bytes_environ else os.environ


def _set_variables(wanted: dict[Any, Any]) -> None:
    now = table_of_variables()
    for name in now.keys() - wanted.keys():
        del _ENVIRON[name]
    _ENVIRON.update(wanted.items() - now.items())


def _set_level(level: int) -> None:
    if logging.root.level != level:
        logging.root.setLevel(level)


_NAMES: tuple[tuple[Any, str], ...] = (
    (logging.root, "handlers"),
    *((sys, name) for name in ("stdout", "stderr", "excepthook", "argv")),
    *((warnings, name) for name in ("filters", "showwarning")),
    *((world, name) for name in ("_current", "_ambient")),
    (rendezvous, "_generation"),
    (signing, "_agreements"),
    *hook_tables(),
    *module_locks(),
)
# Ways to read and to set what each rank has of its own.
_PARTS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (lambda: dict(table_of_variables()), _set_variables),
    (RandomState.capture, RandomState.restore),
    (os.getcwd, os.chdir),
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: logging.root.level, _set_level),
    *((partial(getattr, *each), partial(setattr, *each)) for each in (*_NAMES, *group_tables())),
)


_libraries = set[str]()  # names of modules that were seen, and are no rank's own


class Process:
    """What would be a process of its own: of a simulated rank, or of the caller. It is kept here while it has no turn.

    Args:
        number: of the rank.
        variables: what it has in place of this process's variables, at the start.
        modules: those it begins with, where ``__main__`` and all modules but those of libraries are the rank's own.

    Attributes:
        modules: the rank's own while another rank has its turn; ``None`` where all are shared.
        events: the number of collectives, messages, and operations on stores and files that the rank has begun.
        is_dead: whether it was killed.
    """

    def __init__(self, number: int, variables: Mapping[str, str], modules: dict[str, ModuleType] | None) -> None:
        self.number, self.events, self.is_dead = number, 0, False
        self._values = [_copied(get()) for get, _ in _PARTS]
        groups = [type(value)() for value in self._values[-len(group_tables()) :]]
        self._values[-len(groups) :] = groups
        code = os.fsencode if os.supports_bytes_environ else str
        self._values[0] |= {code(name): code(value) for name, value in variables.items()}
        self.modules, self._count = modules, 0

    def enter(self) -> None:
        """Make this the state of the process."""
        for (_, set_part), value in zip(_PARTS, self._values, strict=True):
            set_part(value)
        if self.modules is not None:
            sys.modules.update(self.modules)
            self._count = len(sys.modules)

    def leave(self) -> None:
        """Keep what is now the state of the process."""
        self._values = [get() for get, _ in _PARTS]
        if self.modules is None:
            return
        if len(sys.modules) != self._count:  # some were imported
            for name in sys.modules.keys() - self.modules.keys() - _libraries:
                self.modules.update({name: sys.modules[name]}) if _is_own(name) else _libraries.add(name)
        self.modules = {name: sys.modules.pop(name) for name in self.modules if name in sys.modules}


def _copied(value: Any) -> Any:
    return type(value)(value) if isinstance(value, (dict, list)) else value


def _is_own(name: str) -> bool:
    if name.partition(".")[0] in _ALSO_OWN:
        return True
    module = sys.modules[name]
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    is_library = not is_users(file) or any(f"{os.sep}{each}{os.sep}" in file for each in _INSTALLED)
    return bool(file) and not is_library and not file.endswith(tuple(EXTENSION_SUFFIXES))
