"""Run the programs of the fixed point, and print what differs from the record: `make corpus`.

    python -m tests.corpus                      all of them; exit code 1 where one differs that went.json does not name
    python -m tests.corpus --only docs/howto    those whose name has this regular expression in it
    python -m tests.corpus --record             write recorded.json; of what is there, keep what is given again

A program is recorded twice or more, at the fixed point: what differs from run to run is not kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.corpus.output import Given, differences, without_unstable
from tests.corpus.run import PROGRAMS, begin, run

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.json"
TABLE: dict[str, Any] = json.loads((HERE / "programs.json").read_text())


def names() -> list[str]:
    """Return the names of all programs: of a page, or of a file, with its command where that is not the plain one."""
    found = []
    for path in PROGRAMS.rglob("*"):
        if path.suffix in (".md", ".py"):
            name = str(path.relative_to(PROGRAMS))
            found += [f"{name}: {command}" for command in TABLE["runs"][name]] if name in TABLE["runs"] else [name]
    return sorted(found)


def results(wanted: list[str], jobs: int) -> Iterator[tuple[str, Given]]:
    """Yield what each program gives, in the order of their names."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), begin) as pool:
        running = [pool.submit(run, name) for name in wanted]
        for name, future in zip(wanted, running, strict=True):
            given, seconds = future.result()
            print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
            yield name, given


def record(wanted: list[str], jobs: int) -> None:
    """Write what programs give; of what is recorded already, keep what they give again."""
    recorded: dict[str, Given] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for name, given in results(wanted, jobs):
        recorded[name] = without_unstable(recorded[name], given) if name in recorded else given
        if wrong := why_wrong(name):
            recorded[name]["wrong"] = wrong
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def why_wrong(name: str) -> str:
    """Return why what a program gives is not right, by its own first line; ``""`` where it is right."""
    if not name.startswith(tuple(TABLE["wrong"])) or name.partition(": ")[0] in TABLE["right"]:
        return ""
    first = (PROGRAMS / name.partition(": ")[0]).read_text().partition("\n")[0]
    return first.strip('"') if first.startswith('"""') else "see its text"


def compare(wanted: list[str], jobs: int) -> int:
    """Run programs, print what differs from the record, and return the exit code."""
    recorded: dict[str, Given] = json.loads(RECORDED.read_text())
    went: dict[str, str] = json.loads((HERE / "went.json").read_text())
    differ, mended, unlisted, listed = 0, [], [], set()
    for name, given in results(wanted, jobs):
        was = recorded.get(name, {})
        found = list(differences(was, given)) if was else ["It is not in recorded.json."]
        if not found:
            continue
        differ += 1
        print(f"\n{name}")
        if "wrong" in was:
            mended.append(name)
            print(f"  It was not right: {was['wrong']}")
        elif file := next((file for file in went if name.startswith(file)), None):
            listed.add(file)
            print(f"  It went: {went[file]}")
        else:
            unlisted.append(name)
        print(*(f"  {line[:300]}" for line in found[:20]), *(["  …"] if len(found) > 20 else []), sep="\n")
    print(f"\n{len(wanted) - differ} of {len(wanted)} programs give what was recorded.")
    if mended:
        print(f"{len(mended)} that were not right at the fixed point give something else: {', '.join(mended)}")
    if needless := [file for file in went if file not in listed and any(name.startswith(file) for name in wanted)]:
        print(f"went.json names programs that give what was recorded: {', '.join(needless)}")
    if unlisted:
        print(f"{len(unlisted)} differ, and went.json does not say why: {', '.join(unlisted)}")
    return 1 if unlisted else 0


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description="Run the programs of the fixed point.")
    parser.add_argument("--record", action="store_true", help="write, or keep what is given again")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression within their names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="programs that run at a time")
    asked = parser.parse_args()
    wanted = [name for name in names() if re.search(asked.only, name)]
    if not wanted:
        parser.error(f"no program's name has {asked.only!r} in it")
    if asked.record:
        record(wanted, asked.jobs)
        return 0
    return compare(wanted, asked.jobs)


if __name__ == "__main__":
    sys.exit(main())
