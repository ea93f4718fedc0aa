"""The notebooks of the examples run from their first cell to their last, and show what they had shown when saved."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.docs.due import cases
from tests.docs.pages import ROOT
from tests.interpreters import run_python
from tests.nightly import changed_since_green

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.ipynb"))}

# In a process of its own: jupyter_client leaves event loops and sockets behind. Prints the outputs, as a list of cells.
RUN = """
import json, sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
print(json.dumps([cell.get("outputs", []) for cell in notebook.cells]))
"""


def kinds(outputs: list[dict[str, Any]]) -> set[str]:
    """Return what kinds of output a cell has: text on standard output, a picture, a value, an error."""
    found = {"picture" for output in outputs if "image/png" in output.get("data", {})}
    found |= {"error" for output in outputs if output["output_type"] == "error"}
    return found | {"printed" for output in outputs if output.get("name") == "stdout"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let the notebooks that have changed run in `make test-all`, and all of them in `make nightly`."""
    if "notebook" in metafunc.fixturenames:
        changed = changed_since_green("notebooks")
        due = {name for name in NOTEBOOKS if changed is None or f"examples/notebooks/{name}.ipynb" in changed}
        metafunc.parametrize("notebook", cases(metafunc.config, "notebooks", NOTEBOOKS, due))


def test_the_notebook_runs(notebook: str, tmp_path: Path) -> None:
    """No cell fails but one that is to, and each shows what it had shown when it was saved; numbers may differ."""
    pytest.importorskip("nbclient")
    # ipykernel leaves the descriptors alone where it believes to be in one of its own tests.
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "DISTWRAP_TRACEBACK": ""}
    done = run_python("-c", RUN, FOLDER / f"{notebook}.ipynb", cwd=tmp_path, env=env, timeout=280)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    saved = [cell.get("outputs", []) for cell in NOTEBOOKS[notebook]["cells"]]
    assert list(map(kinds, shown)) == list(map(kinds, saved))
