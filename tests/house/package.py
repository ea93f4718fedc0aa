"""The package as text: the syntax trees of its files; and the scripts of the docs folder."""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "distwrap"


def script(name: str) -> ModuleType:
    """Import a script of the docs folder, which is no package, and what it imports from there."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return module


@cache
def trees(package: Path = PACKAGE) -> dict[Path, ast.Module]:
    """Return the syntax tree of every file of the package."""
    return {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a syntax tree, which is walked once for all rules."""
    return list(ast.walk(tree))
