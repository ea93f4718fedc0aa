"""Each block of code in the documentation runs, or says why it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, faults_of, has_code, run_page

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
WITH_CODE = [name for name, text in PAGES.items() if has_code(text)]


@pytest.mark.parametrize("name", PAGES)
def test_each_block_runs_or_says_why_not(name: str) -> None:
    """A page has no code that nobody runs, but for blocks with a reason."""
    elsewhere = ["console"] if name.startswith("docs/coming_from/") else []  # by test_coming_from.py
    assert list(faults_of(PAGES[name], *elsewhere)) == []


@pytest.mark.slow("runs the programs of every page")
@pytest.mark.parametrize("name", WITH_CODE)
def test_the_page_runs(name: str, tmp_path: Path) -> None:
    """The programs and commands of a page end well, and print what it shows."""
    run_page(PAGES[name], tmp_path)


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


def test_a_page_is_run_as_it_is_marked(tmp_path: Path) -> None:
    """Blocks make programs, files are written, commands are run, and what is not to be run is not."""
    assert run_page(PAGE, tmp_path).split("\n") == ["first", "from the file", "second 1.5", ""]


@pytest.mark.parametrize(
    ("old", "new"), [("first\nfrom", "last\nfrom"), ('print("from the file")', "1 / 0"), ("python train.py", "false")]
)
def test_a_page_that_is_wrong_fails(old: str, new: str, tmp_path: Path) -> None:
    """Something else printed, a program that fails and a command that fails are all seen."""
    with pytest.raises(AssertionError):
        run_page(PAGE.replace(old, new), tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```yaml\na: 1\n```\n", "a block of yaml is a file"),
        ("```console\n$ ls\n```\n", "a block of console is a file, or is not run for a reason"),
        ("<!-- not run -->\n```python\n1\n```\n", "says nothing after its colon"),
        ("<!-- printed -->\n```python\n1\n```\n", "is a block of text"),
    ],
)
def test_code_that_nobody_runs_is_seen(text: str, fault: str) -> None:
    """A block in another language needs a mark, and a mark its reason."""
    (found,) = faults_of(text)
    assert fault in found
