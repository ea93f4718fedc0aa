"""The package as text: its modules, their syntax trees, and the script that reads imports."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "distwrap"


def script(name: str) -> ModuleType:
    """Import a script of the docs folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trees(package: Path = PACKAGE) -> dict[Path, ast.Module]:
    """Return the syntax tree of every file of the package."""
    return {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
