"""The chapters of the tutorial follow each other: each begins with the files that the one before has left."""

from __future__ import annotations

import difflib
import re
from itertools import pairwise

import pytest

from tests.docs.pages import DOCS, blocks_of

FOLDER = DOCS / "tutorial"
CHAPTERS = re.findall(r"^\d\. \[[^]]*\]\((\w+\.md)\)", (FOLDER / "index.md").read_text(), re.MULTILINE)


def versions(chapter: str, name: str) -> list[str]:
    """Return the texts of a file on a chapter's page, in their order."""
    blocks = blocks_of((FOLDER / chapter).read_text())
    return [block.text for block in blocks if block.mark == "file" and block.value == name]


def test_there_are_seven_chapters() -> None:
    """The index lists them in their order, and no page is left out."""
    assert len(CHAPTERS) == 7
    assert {*CHAPTERS, "index.md"} == {path.name for path in FOLDER.glob("*.md")}


@pytest.mark.parametrize(("chapter", "next_one"), list(pairwise(CHAPTERS)))
def test_a_chapter_begins_where_the_one_before_ended(chapter: str, next_one: str) -> None:
    """The data are the same on every page, and the loop is the one that the last chapter made."""
    assert versions(next_one, "digits.py") == versions(chapter, "digits.py")
    assert versions(next_one, "train.py")[0] == versions(chapter, "train.py")[-1]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_shows_the_difference_that_it_makes(chapter: str) -> None:
    """The difference on the page is the one between the loop at its beginning and at its end, but for empty lines."""
    shown = [block.text for block in blocks_of((FOLDER / chapter).read_text()) if block.language == "diff"]
    before, *after = (text.splitlines() for text in versions(chapter, "train.py"))
    lines = [*difflib.unified_diff(before, after[-1], n=0, lineterm="")][2:] if after else []
    changed = [line for line in lines if not line.startswith("@@") and line[1:].strip()]
    assert [line for line in "".join(shown).splitlines() if line] == changed
