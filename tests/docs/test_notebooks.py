"""The notebooks of the examples run from their first cell to their last, and are kept clean with what they show."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.interpreters import run_python

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.ipynb"))}
RAISES = "raises-exception"  # the tag of a cell that ends with an error, as Jupyter knows it

# In a process of its own: jupyter_client leaves event loops and sockets behind. Prints the outputs, as a list of cells.
RUN = """
import json, sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
print(json.dumps([cell.get("outputs", []) for cell in notebook.cells]))
"""


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells with code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    """Return the text of a cell."""
    return "".join(cell["source"])


def kinds(outputs: list[dict[str, Any]]) -> set[str]:
    """Return what kinds of output a cell has: text on standard output, a picture, a value, an error."""
    found = {"picture" for output in outputs if "image/png" in output.get("data", {})}
    found |= {"error" for output in outputs if output["output_type"] == "error"}
    return found | {"printed" for output in outputs if output.get("name") == "stdout"}


def test_the_four_are_there() -> None:
    """A notebook to start, one of slow links, one of huge data, and one of slow loops."""
    assert set(NOTEBOOKS) == {"huge_data", "slow_link", "start", "why_slow"}


@pytest.mark.slow("starts a kernel, and ranks from its cells")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_runs(name: str, tmp_path: Path) -> None:
    """No cell fails but one that is to, and each shows what it had shown when it was saved; numbers may differ."""
    pytest.importorskip("nbclient")
    # ipykernel leaves the descriptors alone where it believes to be in one of its own tests.
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "DISTWRAP_TRACEBACK": ""}
    done = run_python("-c", RUN, FOLDER / f"{name}.ipynb", cwd=tmp_path, env=env, timeout=280)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    saved = [cell.get("outputs", []) for cell in NOTEBOOKS[name]["cells"]]
    assert list(map(kinds, shown)) == list(map(kinds, saved))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_was_saved_after_a_whole_run(name: str) -> None:
    """All cells were run once, in their order, and only one that says so has an error."""
    cells = code_cells(NOTEBOOKS[name])
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert ("error" in kinds(cell["outputs"])) is (RAISES in cell["metadata"].get("tags", []))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_is_clean(name: str) -> None:
    """It names no folder of the machine it was run on, has no metadata but the kernel, and is of moderate size."""
    notebook = NOTEBOOKS[name]
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert all(set(cell["metadata"]) <= {"tags"} for cell in notebook["cells"])
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert not [path for path in ("/home/", "/tmp/", "/root", "/work", "site-packages") if path in text]
    assert len(text) < 250_000


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_of_the_notebook_lead_somewhere(name: str) -> None:
    """A link goes to another notebook or to a page of the documentation."""
    text = "".join(source(cell) for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links or name == "huge_data"
    assert all((FOLDER / link).exists() for link in links)
    assert all((FOLDER / link).suffix == ".ipynb" or DOCS in (FOLDER / link).resolve().parents for link in links)


def test_the_site_shows_each_notebook() -> None:
    """Each one is in the index of the site."""
    index = (DOCS / "index.md").read_text()
    assert [name for name in NOTEBOOKS if f"\nnotebooks/{name}\n" not in index] == []
