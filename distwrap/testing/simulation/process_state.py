"""What a process has of its own, and threads of one process share: put away while another rank has its turn."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from distwrap._internals.python import module_locks
from distwrap._internals.torch_simulation import GroupsOfRank, groups_of_process, hook_tables, set_groups_of_process
from distwrap.group import signing, world
from distwrap.network import rendezvous
from distwrap.seeding import RandomState
from distwrap.supervision.stacks import is_users

# Module or other owner, and the name of what each rank has of it.
_NAMES: tuple[tuple[Any, str], ...] = (
    (logging.root, "handlers"),
    (sys, "stdout"),
    (sys, "stderr"),
    (sys, "excepthook"),
    (sys, "argv"),
    (warnings, "filters"),
    (warnings, "showwarning"),
    (world, "_current"),
    (world, "_ambient"),
    (rendezvous, "_generation"),
    (signing, "_agreements"),
    *hook_tables(),
    *module_locks(),
)


_INSTALLED = ("site-packages", "dist-packages")  # also those of a user, and of an interpreter around this one
_ENVIRON: Any = os.environb if os.supports_bytes_environ else os.environ  # bytes need no decoding at each turn


@dataclass
class ProcessState:
    """State of a simulated rank's process, kept here while another rank has its turn.

    Attributes:
        variables: what it has in place of this process's variables, at the start.
        environ: its variables.
        random: state of its generators, and the seed of its next runs.
        groups: torch's process groups.
        values: of `_NAMES`.
        dtype: torch's default.
        owns_modules: whether ``__main__`` and all modules but those of libraries are the rank's own.
        modules: those modules.
        shared: number of the other modules when this rank last had its turn.
        directory: the working directory.
        level: of the root logger.
    """

    variables: InitVar[Mapping[str, str]] = MappingProxyType({})
    environ: dict[Any, Any] = field(default_factory=lambda: dict(_ENVIRON))
    random: RandomState = field(default_factory=RandomState.capture)
    groups: Any = field(default_factory=GroupsOfRank)
    values: list[Any] = field(default_factory=lambda: [_copied(getattr(*each)) for each in _NAMES])
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    owns_modules: bool = False
    modules: dict[str, ModuleType] = field(default_factory=dict)
    shared: int = 0
    directory: str = field(default_factory=os.getcwd)
    level: int = field(default_factory=lambda: logging.root.level)

    def __post_init__(self, variables: Mapping[str, str]) -> None:
        code = os.fsencode if os.supports_bytes_environ else str
        self.environ |= {code(name): code(value) for name, value in variables.items()}

    @classmethod
    def capture(cls, *, owns_modules: bool = False) -> ProcessState:
        """Return the state of this process."""
        found = cls(owns_modules=owns_modules)
        found.leave()
        return found

    def _set_modules_aside(self) -> None:
        """Take this rank's own modules out of the process's: those that are known, and those that it has imported."""
        new = len(sys.modules) - self.shared - len(self.modules)
        for name in reversed(list(sys.modules)) if new else ():
            module = sys.modules[name]
            if _is_own(name, module):
                self.modules[name] = module
        self.modules = {name: sys.modules.pop(name) for name in self.modules if name in sys.modules}
        self.shared = len(sys.modules)

    def enter(self) -> None:
        """Make this the state of the process."""
        now = dict(_ENVIRON)
        for name in now.keys() - self.environ.keys():
            del _ENVIRON[name]
        for name, value in self.environ.items() - now.items():
            _ENVIRON[name] = value
        set_groups_of_process(self.groups)
        self.random.restore()
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
        for (module, name), value in zip(_NAMES, self.values, strict=True):
            setattr(module, name, value)
        if os.getcwd() != self.directory:
            os.chdir(self.directory)
        if logging.root.level != self.level:
            logging.root.setLevel(self.level)
        if self.owns_modules:
            sys.modules.update(self.modules)

    def leave(self) -> None:
        """Keep what is now the state of the process."""
        self.environ = dict(_ENVIRON)
        self.groups = groups_of_process()
        self.random = RandomState.capture()
        self.dtype = torch.get_default_dtype()
        self.values = [getattr(*each) for each in _NAMES]
        self.directory, self.level = os.getcwd(), logging.root.level
        if self.owns_modules:
            self._set_modules_aside()


def _copied(value: Any) -> Any:
    return type(value)(value) if isinstance(value, (dict, list)) else value


def _is_own(name: str, module: ModuleType) -> bool:
    if name == "__main__":
        return True
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    is_library = not is_users(file) or any(f"{os.sep}{each}{os.sep}" in file for each in _INSTALLED)
    return bool(file) and not is_library and not file.endswith(tuple(EXTENSION_SUFFIXES))
