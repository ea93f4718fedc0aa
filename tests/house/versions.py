"""Versions of torch and Python are compared in one file, and what is run begins with the oldest that is allowed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

from tests.house.package import PACKAGE, ROOT, nodes

PLACE = PACKAGE / "versions.py"
# What tells the version of torch or Python, or asks a package of torch's for a name that not every version has.
TELLS = {"torch.__version__", "sys.version_info", "sys.hexversion", "platform.python_version_tuple"}
LAST_PARTS = {tells.rpartition(".")[2] for tells in TELLS}

# Each is a comparison.
PLANTED = (
    "import sys\nif sys.version_info < (3, 12): pass",
    "from sys import version_info",
    "old = torch.__version__ < '2.8'",
    "if hasattr(torch.optim, 'Muon'): pass",
)


def problems(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield each comparison with a version in another file, and where what is run differs from what is allowed."""
    for path, tree in trees.items():
        if path != PLACE:
            found = list(comparisons(path, tree))
            if "_internals" in path.parts:  # where torch is asked for names
                found = [each for each in found if "hasattr" not in each]
            yield from (f"{each}: versions are compared in versions.py" for each in found)
    for code in PLANTED:
        if not list(comparisons(Path("planted.py"), ast.parse(code))):
            yield f"This comparison would not be seen: {code}"
    yield from pairs_that_are_run(ast.unparse(trees[PLACE]))


def comparisons(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield where a file looks at a version, or asks torch for a public name that may not be there."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in LAST_PARTS and ast.unparse(node) in TELLS:
            yield f"{path.name}:{node.lineno} {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and node.module == "sys":
            yield from (f"{path.name}:{node.lineno} {name.name}" for name in node.names if "version" in name.name)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hasattr":
            asked = ast.unparse(node.args[0])
            if re.match(r"torch\b(?!\._)", asked) and isinstance(node.args[1], ast.Constant):
                yield f"{path.name}:{node.lineno} hasattr({asked}, …)"


def pairs_that_are_run(code: str) -> Iterator[str]:
    """Yield where the pairs of noxfile.py differ from setup.cfg, or from what the package says was seen."""
    pairs = re.findall(r'\("(2\.\d+)\.\d+", "(3\.\d+)"\)', (ROOT / "noxfile.py").read_text())
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pythons = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    releases = sorted({torch for torch, _ in pairs}, key=lambda release: int(release.partition(".")[2]))
    if f"torch>={releases[0]}\n" not in setup["options"]["install_requires"]:
        yield "noxfile.py does not begin with the oldest torch that setup.cfg allows"
    if f"'{releases[0]} to {releases[-1]}'" not in code:
        yield "noxfile.py has other versions of torch than TORCH_SEEN of versions.py"
    if {python for _, python in pairs} != set(pythons) or setup["options"]["python_requires"] != f">={pythons[0]}":
        yield "noxfile.py has other versions of Python than setup.cfg"
