"""The page of benchmarks, its pictures and the file of figures say the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.docs.pages import DOCS, ROOT

FIGURES = json.loads((ROOT / "benchmarks" / "figures.json").read_text())
PAGE = (DOCS / "measured.md").read_text()
PARTS = ("Compared", "Repeat it", "When", "What it does not show")


def section_of(name: str, page: str = PAGE) -> str:
    """Return the section of the page that shows a picture."""
    (section,) = (each for each in page.split("\n## ") if f"](pictures/{name}.svg)" in each)
    return section


def words_of(what: dict[str, Any]) -> Iterator[str]:
    """Yield each word of a picture: its title, those of its panels, and what is compared."""
    yield what["title"]
    for panel in what["panels"]:
        yield panel["title"]
        for row, figures in panel["rows"].items():
            yield row
            yield from figures
            yield from figures.values() if what["kind"] == "bars" else ()


def figures_of(what: dict[str, Any]) -> set[str]:
    """Return the figures of a picture, as they are written."""
    return {text for panel in what["panels"] for row in panel["rows"].values() for text in row.values()}


def is_written(figure: str, text: str) -> bool:
    """Tell whether a text has a figure, and not only a longer one that it is part of."""
    return re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d]|\.\d)", text) is not None


def drawn_words(path: Path) -> set[str]:
    """Return the texts of a drawing."""
    return {
        "".join(each.itertext()).strip() for each in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    }


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_stand_on_the_page(name: str) -> None:
    """Each figure that is drawn stands in the section of its picture, and so does the date."""
    section = section_of(name)
    assert {figure for figure in figures_of(FIGURES[name]) if not is_written(figure, section)} == set()
    (date,) = set(re.findall(r"\d{4}-\d\d-\d\d", json.dumps(FIGURES[name])))
    assert date in section.split("**When.**")[1]


@pytest.mark.parametrize("name", FIGURES)
def test_the_picture_is_of_the_figures(name: str) -> None:
    """Each picture has the words, and where there are bars the numbers, of the file that it is drawn from."""
    drawn = drawn_words(DOCS / "pictures" / f"{name}.svg")
    assert {word for word in words_of(FIGURES[name]) if word not in drawn} == set()


def test_a_figure_of_another_run_would_be_seen() -> None:
    """A figure that is not written is told from one that is part of another."""
    assert is_written("1.4 s", "| 0.034 s | 1.4 s |")
    assert not is_written("1.4 s", "| 0.034 s | 11.4 s |")
    assert not is_written("18", "| 1.8 | 187 |")


@pytest.mark.parametrize("section", PAGE.split("\n## ")[1:], ids=lambda section: section.split("\n")[0])
def test_each_section_has_its_parts(section: str) -> None:
    """Each benchmark says what is compared, how to repeat it, when it ran, and what it does not show; it exists."""
    assert [part for part in PARTS if f"**{part}.**" not in section] == []
    scripts = re.findall(r"`python\s+(benchmarks/\w+\.py)`", section.split("**Repeat it.**")[1])
    assert all((ROOT / script).exists() for script in scripts)
    assert scripts or "Scale" in section
    assert re.search(r"\d{4}-\d\d-\d\d.*torch 2\.\d+", section.split("**When.**")[1], re.DOTALL)


def test_every_picture_is_on_a_page() -> None:
    """No drawing is left over, and each one that a page shows is there."""
    shown = {
        (page.parent / target).resolve()
        for page in [*DOCS.rglob("*.md"), ROOT / "README.md"]
        for target in re.findall(r"!\[[^\]]*\]\(([^)]*\.svg)\)", page.read_text())
    }
    assert shown >= set((DOCS / "pictures").glob("*.svg"))
    assert all(path.exists() for path in shown)
