from __future__ import annotations

import ast
import inspect
import pkgutil
from typing import Any

import pytest

import distwrap
from tests.interpreters import run_python


def test_all_is_sorted_and_without_repeats() -> None:
    """The public names are in order, each once."""
    assert distwrap.__all__ == sorted(set(distwrap.__all__))


@pytest.mark.parametrize("name", [*distwrap._PUBLIC, "__version__"])
def test_public_names_are_there_and_documented(name: str) -> None:
    """Each public name can be imported, and says what it does."""
    value = getattr(distwrap, name)
    if name == "__version__":
        assert isinstance(value, str)
    else:
        assert (inspect.getdoc(value) or "").strip()
        assert inspect.getdoc(value) != inspect.getdoc(type(value))


def test_nothing_public_is_left_out() -> None:
    """Each function and class that the package imports for its users is in __all__."""
    public = {
        name for name, value in vars(distwrap).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public <= set(distwrap._PUBLIC)


def names_in_source() -> dict[str, str]:
    """Read the names that a type checker sees in the package, each with its module."""
    blocks = [node for node in ast.parse(inspect.getsource(distwrap)).body if isinstance(node, ast.If)]
    imports = [node for node in blocks[0].body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_a_type_checker_and_the_interpreter_see_the_same_names() -> None:
    """The imports for a checker, the table for the interpreter and __all__ name the same, in the same modules."""
    assert names_in_source() == {name: f"distwrap.{module}" for name, module in distwrap._MODULE_OF.items()}
    assert {*distwrap.__all__, "print"} == {*distwrap._MODULE_OF, "__version__"}
    assert set(distwrap.__all__) <= set(dir(distwrap))


def test_no_public_name_is_a_module_too() -> None:
    """Importing a module binds its name in the package, so a function of that name would be lost."""
    modules = {module.name for module in pkgutil.iter_modules(distwrap.__path__)}
    assert not modules.intersection(distwrap.__all__)


def test_all_can_be_imported_at_once() -> None:
    """`from distwrap import *` gives the public names."""
    namespace: dict[str, Any] = {}
    exec("from distwrap import *", namespace)
    assert set(distwrap.__all__) <= set(namespace)
    assert "print" not in namespace, "the builtin would be another one, and nothing would say so"


def test_modules_and_wrong_names_of_the_package() -> None:
    """A module can be reached as an attribute without an import of its own; a name that there is not is an error."""
    code = "import distwrap; print(distwrap.comm.traffic.__name__, hasattr(distwrap, 'nothing'))"
    done = run_python("-c", code, timeout=60)
    assert done.stdout.split() == ["traffic", "False"], done.stderr


FIRST = """
import os, sys, traceback, importlib, torch, distwrap
for module in sorted(set(distwrap._MODULE_OF.values())):
    pid = os.fork()
    if pid == 0:
        try:
            importlib.import_module(f"distwrap.{module}")
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.waitpid(pid, 0)
"""


@pytest.mark.slow("a fork for each module")
def test_each_module_can_be_the_first() -> None:
    """Names are imported when first used, in any order; so no module may need another one to have been imported."""
    done = run_python("-c", FIRST, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
