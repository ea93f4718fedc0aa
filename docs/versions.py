"""Write what the tests have shown with each version of torch and Python into the table of docs/reference/versions.md.

python docs/versions.py                        # adds the results in build/versions/, which `make test-versions` leaves
python docs/versions.py --tell RESULTS.xml     # prints the line of one run, and writes nothing

A row is replaced by a later run of the same tests with the same versions. The page is the only record.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "versions.md"
BEGIN, END = "<!-- runs -->", "<!-- end of runs -->"
HEAD = "| torch | Python | on | tests | result | day |\n|---|---|---|---|---|---|\n"


class Run(NamedTuple):
    """One run of the tests with one pair of versions.

    Attributes:
        torch: its version, with the name of the build.
        python: its version.
        system: on which it ran.
        tier: which tests ran, as ``"quick"``.
        result: how many passed, failed and were skipped.
        day: when, as ``"2026-11-26"``.
    """

    torch: str
    python: str
    system: str
    tier: str
    result: str
    day: str

    @property
    def place(self) -> tuple[object, ...]:
        """What the row is of: a later run with the same takes its place."""
        return tuple(-number for number in _release(self.torch)), _release(self.python)[:2], self.system, self.tier

    def __str__(self) -> str:
        return f"torch {self.torch}, Python {self.python}, {self.system}, {self.tier}: {self.result}"


def read_results(path: Path) -> Run:
    """Return what a file of pytest's results tells; a session of noxfile.py has named the versions in it."""
    suite = ET.parse(path).getroot().find("testsuite")
    assert suite is not None
    named = re.fullmatch(r"(\S+), torch (\S+), Python (\S+), (.+)", suite.attrib["name"])
    if named is None:
        raise SystemExit(
            f"{path} names no versions: its name is {suite.attrib['name']!r}. Let a session of nox write it."
        )
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    bad = count["failures"] + count["errors"]
    parts = [f"{bad} failed"] * bool(bad) + [f"{count['tests'] - bad - count['skipped']} passed"]
    parts += [f"{count['skipped']} skipped"] * bool(count["skipped"])
    day = suite.attrib["timestamp"].partition("T")[0]
    return Run(named[2], named[3], named[4], named[1], ", ".join(parts), day)


def rows(page: str) -> list[Run]:
    """Return the runs that a page's table has."""
    table = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    return [Run(*(cell.strip() for cell in row.strip("|").split("|"))) for row in table]


def with_runs(page: str, runs: list[Run]) -> str:
    """Return a page whose table has these runs too, the newest torch first."""
    kept = {run.place: run for run in [*rows(page), *runs]}
    lines = [f"| {' | '.join(kept[place])} |\n" for place in sorted(kept)]
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}\n{HEAD}{''.join(lines)}{END}{after}"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def main(words: list[str]) -> None:
    """Print the line of each run that is named, or write all into the page."""
    if words[:1] == ["--tell"]:
        for path in words[1:]:
            print(read_results(Path(path)))
        return
    found = [Path(word) for word in words] or sorted((ROOT / "build" / "versions").glob("*.xml"))
    runs = [read_results(path) for path in found]
    PAGE.write_text(with_runs(PAGE.read_text(), runs))
    print(*runs, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
