"""The code of each page of the documentation runs; `make check` sees that no block is left out without a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.due import cases, due
from tests.docs.pages import DOCS, ROOT, has_code, run_page
from tests.nightly import changed_since_green

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
WITH_CODE = [name for name, text in PAGES.items() if has_code(text)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let the pages that are due run in `make test-all`, and all of them in `make nightly`."""
    if "page" in metafunc.fixturenames:
        texts = {"README.md": (ROOT / "README.md").read_text(), **{name: PAGES[name] for name in WITH_CODE}}
        due_now = due(texts, changed_since_green("pages"))
        metafunc.parametrize("page", cases(metafunc.config, "pages", WITH_CODE, due_now))


def test_the_page_runs(page: str, tmp_path: Path) -> None:
    """The programs and commands of a page end well, and print what it shows."""
    run_page(PAGES[page], tmp_path)


THREE = {
    "docs/start.md": "```python\nfrom distwrap import wrap_model\n```\n",
    "docs/a.md": '```python\nfrom distwrap import distributed, gather\ndistributed(strategy="fsdp")\n```\n',
    "docs/b.md": "```{literalinclude} programs/b.py\n```\n```python\nimport distwrap\ndistwrap.gather\n```\n",
}


@pytest.mark.parametrize(
    ("changed", "pages"),
    [
        (None, ["start", "a", "b"]),
        ([], ["start"]),
        (["docs/b.md"], ["start", "b"]),
        (["docs/programs/b.py"], ["start", "b"]),
        (["distwrap/group/world.py"], ["start", "a"]),
        (["distwrap/group/world.py", "docs/b.md"], ["start", "b"]),
        (["distwrap/strategies/fsdp.py"], ["start", "a"]),
        (["distwrap/data/sharded.py", "setup.cfg"], ["start"]),
    ],
    ids=lambda words: " ".join(words or ["unknown"]),
)
def test_a_page_is_due_where_it_uses_what_has_changed(changed: list[str] | None, pages: list[str]) -> None:
    """Its text, a file that it shows, or a room of which no other page that is due uses the same name."""
    known = None if changed is None else set(changed)
    assert due(THREE, known) == {f"docs/{name}.md" for name in pages}


PAGE = """\
Text.

```python
print("first")
```

<!-- file: train.py -->
```python
print("from the file")
```

```sh
python train.py
```

<!-- not run: it would not end -->
```python
while True: pass
```

<!-- new program -->
```python
print("second 1.5")
```

<!-- printed -->
```text
first
from the file
second …
```
"""


@pytest.mark.slow("others of its kind are in make test")
def test_a_page_is_run_as_it_is_marked(tmp_path: Path) -> None:
    """Blocks make programs, files are written, commands are run, and what is not to be run is not."""
    assert run_page(PAGE, tmp_path).split("\n") == ["first", "from the file", "second 1.5", ""]


@pytest.mark.parametrize(
    ("old", "new"), [("first\nfrom", "last\nfrom"), ('print("from the file")', "1 / 0"), ("python train.py", "false")]
)
@pytest.mark.slow("others of its kind are in make test")
def test_a_page_that_is_wrong_fails(old: str, new: str, tmp_path: Path) -> None:
    """Something else printed, a program that fails and a command that fails are all seen."""
    with pytest.raises(AssertionError):
        run_page(PAGE.replace(old, new), tmp_path)
