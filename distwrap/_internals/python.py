"""Private names of CPython: threads, exit handlers and finalizers at the end of a process, command line, generators.

Every function says which names it relies on, and what happens without them; all were seen in versions 3.10 to 3.13.
"""

import atexit
import ctypes
import importlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import random
import subprocess
import sys
import threading
import weakref
from types import FrameType, ModuleType
from typing import Any

# The module that a pickled path names in Python 3.13.
PATH_MODULES = ("pathlib", "pathlib._local")


def unpickler() -> type[pickle.Unpickler]:
    """Return the unpickler written in Python, which allocates nothing that a pickle only claims to hold.

    Relies on ``pickle:_Unpickler``.
    Without it: a malicious sharded checkpoint of a few bytes can take all memory, and a message of another rank
    without a secret can change the classes of plain data.
    """
    return getattr(pickle, "_Unpickler", pickle.Unpickler)


def frames_of_threads() -> dict[int, FrameType]:
    """Return the current frame of each thread, by the thread's number.

    Relies on ``sys:_current_frames``.
    Without it: hang reports do not know where the ranks are.
    """
    return getattr(sys, "_current_frames", dict)()


def run_interpreter_end(*, threads: bool = True) -> bool:
    """Wait for the other threads and run the exit handlers, as the interpreter does when it ends.

    Relies on ``threading:_shutdown``, ``atexit:_run_exitfuncs``.
    Without it: the interpreter ends ranks itself, which is slower and sometimes aborts under gloo.

    Args:
        threads: whether to wait for threads.

    Returns:
        Whether this was possible; if not, nothing was done.
    """
    join = getattr(threading, "_shutdown", None)
    handlers = getattr(atexit, "_run_exitfuncs", None)
    if join is None or handlers is None:
        return False
    if threads:
        join()
    handlers()
    return True


def can_forget_exit_handlers() -> bool:
    """Return whether a forked process can remove the exit handlers of its parent.

    Relies on ``atexit:_clear``.
    Without it: `launcher="fork"` is refused, and ``"auto"`` chooses another launcher.
    """
    return hasattr(atexit, "_clear")


def forget_exit_handlers() -> None:
    """Remove the exit handlers that a fork has inherited, except multiprocessing's.

    Relies on ``multiprocessing.util:_exit_function``.
    Without it: forked ranks do not run multiprocessing's clean-up at their end.
    """
    atexit._clear()
    multiprocessings = getattr(multiprocessing.util, "_exit_function", None)
    if multiprocessings is not None:
        atexit.register(multiprocessings)


def multiprocessing_settings() -> dict[str, Any]:
    """Return the settings that multiprocessing passes to child processes, such as ``"tempdir"``.

    Relies on ``multiprocessing:process._current_process._config``.
    Without it: loader workers use the default temporary folder, which stays if a rank is killed.
    """
    settings: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    return settings


def interpreter_flags() -> list[str]:
    """Return the command-line arguments that give another interpreter this one's flags.

    Relies on ``subprocess:_args_from_interpreter_flags``.
    Without it: fresh interpreters do not get the caller's -W, -X and -O.
    """
    return getattr(subprocess, "_args_from_interpreter_flags", list)()


def stop_finalizers_at_exit() -> None:
    """Disable all existing finalizers at the end of the process.

    Relies on ``weakref:finalize._registry``.
    Without it: ranks of the fork server end some 30 ms later.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


class GeneratorMemory:
    """State of the generators of `random` and numpy, read from memory in 1 us instead of 10 to 50.

    Relies on ``random:_inst``, and on where CPython and numpy keep the Mersenne Twister's state.
    Without it: each batch is fetched with its own random numbers, even if the dataset draws none.

    Attributes:
        is_known: whether the memory holds what the public getters return.
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []
        self.is_known = True
        try:
            *words, at = random.getstate()[1]
            self._add(id(random._inst) + object.__basicsize__, [at, *words])
            numpy = sys.modules.get("numpy")
            if numpy is not None:
                _, keys, at, *_ = numpy.random.get_state()
                self._add(numpy.random.get_bit_generator().ctypes.state_address, [*keys.tolist(), at])
        except (AttributeError, TypeError, ValueError):
            self.is_known = False

    def _add(self, address: int, words: list[int]) -> None:
        expected = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
        self._places.append((address, len(expected)))
        self.is_known &= ctypes.string_at(address, len(expected)) == expected

    def read(self) -> list[bytes]:
        """Return the raw states."""
        return [ctypes.string_at(address, size) for address, size in self._places]

    def write(self, states: list[bytes]) -> None:
        """Restore states that `read` has returned."""
        for (address, _), state in zip(self._places, states, strict=True):
            ctypes.memmove(address, state, len(state))


def table_of_variables() -> dict[Any, Any]:
    """Return the table in which Python keeps this process's variables, encoded.

    Relies on ``os:environ._data``.
    Without it: each turn of a simulated rank takes a tenth of a millisecond longer.
    """
    table: dict[Any, Any] | None = getattr(os.environ, "_data", None)
    return dict(os.environb if os.supports_bytes_environ else os.environ) if table is None else table


def module_locks() -> list[tuple[ModuleType, str]]:
    """Return the module and the name of Python's table of locks of modules that are being imported, if it has one.

    Relies on ``importlib._bootstrap:_module_locks``.
    Without it: simulated ranks that meet while they import a module wait for each other's import.
    """
    bootstrap = importlib.import_module("importlib._bootstrap")
    return [(bootstrap, "_module_locks")] if hasattr(bootstrap, "_module_locks") else []
