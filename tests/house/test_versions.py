"""Versions of torch and Python are compared in one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distwrap import versions
from distwrap.errors import OptionError
from tests.house.package import PACKAGE, ROOT, trees

PLACE = PACKAGE / "versions.py"
# What tells the version of torch or Python, or asks a package of torch's for a name that not every version has.
TELLS = {"torch.__version__", "sys.version_info", "sys.hexversion", "platform.python_version_tuple"}


def comparisons(path: Path, tree: ast.AST) -> Iterator[str]:
    """Yield where a file looks at a version, or asks torch for a public name that may not be there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in TELLS:
            yield f"{path.name}:{node.lineno} {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and node.module == "sys":
            yield from (f"{path.name}:{node.lineno} {name.name}" for name in node.names if "version" in name.name)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr":
            asked = ast.unparse(node.args[0])
            if re.match(r"torch\b(?!\._)", asked) and isinstance(node.args[1], ast.Constant):
                yield f"{path.name}:{node.lineno} hasattr({asked}, …)"


def test_versions_are_compared_in_one_place() -> None:
    """No other file of the package looks at the version of torch or Python, or asks torch for a public name."""
    others = {path: tree for path, tree in trees().items() if path != PLACE and "_internals" not in path.parts}
    assert not [found for path, tree in others.items() for found in comparisons(path, tree)]
    inside = {path: tree for path, tree in trees().items() if "_internals" in path.parts}
    assert not [each for path, tree in inside.items() for each in comparisons(path, tree) if "hasattr" not in each]


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nif sys.version_info < (3, 12): pass",
        "from sys import version_info",
        "old = torch.__version__ < '2.8'",
        "if hasattr(torch.optim, 'Muon'): pass",
    ],
)
def test_a_comparison_would_be_seen(code: str) -> None:
    """The test above finds each kind of comparison."""
    assert list(comparisons(Path("planted.py"), ast.parse(code)))


def test_what_is_run_begins_with_the_oldest() -> None:
    """The pairs of noxfile.py have the oldest torch that setup.cfg allows, and the oldest and newest Python."""
    pairs = re.findall(r'\("(2\.\d+)\.\d+", "(3\.\d+)"\)', (ROOT / "noxfile.py").read_text())
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pythons = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    releases = sorted({torch for torch, _ in pairs}, key=lambda release: int(release.partition(".")[2]))
    assert f"torch>={releases[0]}\n" in setup["options"]["install_requires"]
    assert f"{releases[0]} to {releases[-1]}" == versions.TORCH_SEEN
    assert {python for _, python in pairs} == set(pythons)
    assert setup["options"]["python_requires"] == f">={pythons[0]}"


def test_an_older_torch_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is needed, what is here, why, and what to use instead; the version itself is enough."""
    monkeypatch.setattr(versions, "TORCH", "2.7.1")
    monkeypatch.setattr(versions, "TORCH_RELEASE", (2, 7))
    versions.require_torch("strategy='x'", (2, 7), "it loops", "strategy='ddp'")
    with pytest.raises(OptionError) as caught:
        versions.require_torch("strategy='x'", (2, 8), "it loops", "strategy='ddp'")
    assert str(caught.value) == (
        "strategy='x' needs torch 2.8 or newer, and this is 2.7.1: before, it loops. "
        "Install a newer torch, or use strategy='ddp'."
    )


def test_this_torch_does_what_its_version_says() -> None:
    """What can be asked for agrees with the version."""
    assert hasattr(dist.Store, "clone") == versions.STORES_CLONE
    assert hasattr(torch.accelerator, "empty_cache") == versions.ASKS_WITHOUT_DRIVER
