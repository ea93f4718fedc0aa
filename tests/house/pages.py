"""Pages and notebooks: code that nobody runs, chapters and programs that do not fit together, dead links."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.docs.pages import DOCS, ROOT, blocks_of, faults_of

NOTEBOOKS = ROOT / "examples" / "notebooks"
TUTORIAL = DOCS / "tutorial"
COMING_FROM = DOCS / "coming_from"
RAISES = "raises-exception"  # the tag of a cell that ends with an error, as Jupyter knows it
OF_A_MACHINE = ("/home/", "/tmp/", "/root", "/work", "site-packages")

# Each has one fault.
PLANTED = (
    "```yaml\na: 1\n```\n",
    "```console\n$ ls\n```\n",
    "<!-- not run -->\n```python\n1\n```\n",
    "<!-- printed -->\n```python\n1\n```\n",
)


def problems() -> Iterator[str]:
    """Yield what is wrong with the pages and notebooks."""
    for path in sorted(DOCS.rglob("*.md")):
        elsewhere = ["console"] if path.parent == COMING_FROM else []  # tests/docs/coming_from.py runs it
        text = path.read_text()
        yield from (f"{path.relative_to(ROOT)}, {fault}" for fault in faults_of(text, *elsewhere))
        yield from (f"{path.relative_to(ROOT)} links to {link}" for link in dead_links(path, text))
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        yield from (f"{name} links to {link}" for link in dead_links(ROOT / name, (ROOT / name).read_text()))
    for text in PLANTED:
        if len(list(faults_of(text))) != 1:
            yield f"This fault of a page would not be seen: {text}"
    yield from readme()
    yield from tutorial()
    yield from coming_from()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        yield from (f"{path.name} {fault}" for fault in notebook(path, json.loads(path.read_text())))


def dead_links(path: Path, text: str) -> Iterator[str]:
    """Yield the links of a page to files that are not there."""
    text = re.sub(r"^( *)(`{3,}).*?^ *\2$", "", text, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        file = link.partition("#")[0]
        if file and "://" not in file and not file.startswith("mailto:") and not (path.parent / file).exists():
            yield link


def readme() -> Iterator[str]:
    """Yield whether README's difference is not a part of the one between its two files."""
    texts = ((ROOT / "examples" / name).read_text().splitlines() for name in ("digits_plain.py", "digits.py"))
    whole = "\n".join(difflib.unified_diff(*texts, n=1000, lineterm=""))
    for shown in re.findall(r"```diff\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL) or [""]:
        if f"\n{shown}\n" not in whole or "+@distributed" not in shown:
            yield f"README.md has another difference than examples/digits_plain.py and digits.py:\n{whole}"


def tutorial() -> Iterator[str]:
    """Yield where a chapter does not begin with the files that the one before has left."""
    chapters = re.findall(r"^\d\. \[[^]]*\]\((\w+\.md)\)", (TUTORIAL / "index.md").read_text(), re.MULTILINE)
    if {*chapters, "index.md"} != {path.name for path in TUTORIAL.glob("*.md")}:
        yield "docs/tutorial/index.md lists other chapters than there are"
    for chapter, following in pairwise(chapters):
        for name in ("digits.py", "train.py"):
            if versions(following, name)[0] != versions(chapter, name)[-1]:
                yield f"docs/tutorial/{following} begins with another {name} than {chapter} has left"


def versions(chapter: str, name: str) -> list[str]:
    """Return the texts of a file on a chapter's page, in their order."""
    blocks = blocks_of((TUTORIAL / chapter).read_text())
    return [block.text for block in blocks if block.mark == "file" and block.value == name]


def coming_from() -> Iterator[str]:
    """Yield which page shows a program that it does not run, and which page or program is forgotten."""
    names = {path.stem for path in COMING_FROM.glob("*.md")} - {"index"}
    row = re.compile(r"^\| \[[^]]+\]\((\w+)\.md\).* (?:to the bit|to 1e-6) \|$", re.MULTILINE)
    rows = row.findall((COMING_FROM / "index.md").read_text())
    if sorted(rows) != sorted(names):
        yield f"docs/coming_from/index.md has rows of {rows}, which say how equal the weights are"
    shown_by_all = set()
    for name in sorted(names):
        text = (COMING_FROM / f"{name}.md").read_text()
        commands = "".join(block.text for block in blocks_of(text) if block.language == "console")
        shown = re.findall(r"literalinclude} programs/(\w+\.py)", text)
        shown_by_all.update(shown)
        if len(shown) != 2:
            yield f"docs/coming_from/{name}.md shows {shown}, and not a program before and one after"
        yield from (f"docs/coming_from/{name}.md does not run {each}" for each in shown if each not in commands)
    for path in (COMING_FROM / "programs").glob("*.py"):
        if path.name not in shown_by_all:
            yield f"docs/coming_from/programs/{path.name} is on no page"


def notebook(path: Path, found: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a notebook as it was saved."""
    cells = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    if [cell["execution_count"] for cell in cells] != list(range(1, len(cells) + 1)):
        yield "was not saved after one whole run"
    for cell in cells:
        has_failed = any(output["output_type"] == "error" for output in cell["outputs"])
        if has_failed is not (RAISES in cell["metadata"].get("tags", [])):
            yield f"has an error in cell {cell['execution_count']}, or the tag of one"
    metadata = found["metadata"]
    if metadata["kernelspec"]["name"] != "python3" or set(metadata) != {"kernelspec", "language_info"}:
        yield "has metadata beside the kernel's"
    if any(not set(cell["metadata"]) <= {"tags"} for cell in found["cells"]):
        yield "has metadata of cells"
    text = path.read_text()
    yield from (f"names {word}" for word in OF_A_MACHINE if word in text)
    if len(text) > 250_000:
        yield "is large"
    prose = "".join("".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "markdown")
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        target = (path.parent / link).resolve()
        if not target.exists() or not (target.suffix == ".ipynb" or DOCS in target.parents):
            yield f"links to {link}"
    if f"\nnotebooks/{path.stem}\n" not in (DOCS / "index.md").read_text():
        yield "is not in docs/index.md"
