"""The page of errors quotes messages as the package has them, so that a search for their words finds them."""

from __future__ import annotations

import re
import runpy

from distwrap import errors
from tests.docs.pages import DOCS

MESSAGES = runpy.run_path(str(DOCS / "_extension" / "messages.py"))
ROWS = re.findall(r"^\| `(\w+)`: (.+?) \|", (DOCS / "reference" / "errors.md").read_text(), re.MULTILINE)


def test_the_messages_that_people_meet_most_are_quoted_as_they_are() -> None:
    """Each row of the first table that names an error of distwrap has the words of one of the package's messages."""
    ours = [(name, words) for name, words in ROWS if hasattr(errors, name)]
    assert len(ours) > 15
    package = "".join(path.read_text() for path in MESSAGES["PACKAGE"].rglob("*.py"))
    found = "\n".join([package, *(text for name in vars(errors) for text in MESSAGES["messages_of"](name))])
    for name, words in ours:
        for part in filter(None, map(str.strip, words.split("…"))):
            assert part in found, f"{name}: {part}"


def test_a_message_that_a_function_makes_is_on_the_page() -> None:
    """Words that a function of the same file puts together are found as those of the error that gets them."""
    assert any("has got the same inputs on all" in text for text in MESSAGES["messages_of"]("LoaderError"))
