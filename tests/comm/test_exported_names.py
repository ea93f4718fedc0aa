"""The names of `distwrap.comm`: type checkers and the running package find the same ones in the same modules."""

from __future__ import annotations

import ast
import inspect

import pytest

from distwrap import comm


def test_type_checkers_see_what_runs() -> None:
    """The block of imports that only type checkers read has the names and modules of the table."""
    blocks = [node for node in ast.parse(inspect.getsource(comm)).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {node.module: sorted(alias.asname or "" for alias in node.names) for node in imports}
    assert seen == {f"distwrap.comm.{module}": sorted(names.split()) for module, names in comm._NAMES.items()}


@pytest.mark.parametrize("name", comm.__all__)
def test_a_name_is_imported_when_it_is_used(name: str) -> None:
    assert getattr(comm, name).__module__.startswith(("distwrap.comm.", "distwrap.protocols"))


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'AllGather'"):
        comm.AllGather  # noqa: B018
