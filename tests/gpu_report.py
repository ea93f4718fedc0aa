"""`make gpu-report`: what tests and a benchmark show on this machine's accelerators, in a report with its date.

Each file of tests is a pytest of its own with a limit, so that one that hangs costs itself alone. Where there is no
accelerator the report is dry: tests run on pretended devices, the benchmark on the CPU, and the first line says so.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[1]
SECONDS = 200  # for each step on a device
SECONDS_DRY = 500  # a compiler works a minute of it where there is no accelerator
AT_ONCE = 6  # files of tests, on one device
HELPFUL = ("pytest_timeout", "hypothesis", "sklearn", "numpy")  # without which tests are left out, or have no limit


@dataclass
class Step:
    """A command of the report, and how it went.

    Attributes:
        name: for the reader.
        words: after ``python``.
        seconds: that it has taken.
        how: "passed", or what it has not.
        counts: tests by outcome.
        failures: first lines of what failed.
        output: its last lines.
    """

    name: str
    words: list[str]
    seconds: float = 0.0
    how: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    output: str = ""


def readme_program() -> str:
    """Return the whole program that README shows."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if "if __name__" in block)


def main() -> int:
    """Run the steps, print the report and write it; return 1 if one of the steps has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for report.md, report.json and junit.xml")
    parser.add_argument("--tests", nargs="+", default=None, help="files of tests; by default all with a test for a GPU")
    args = parser.parse_args()
    begun, here = time.monotonic(), facts()
    with tempfile.TemporaryDirectory() as folder:
        steps = tests(Path(folder), args.tests or test_files(), dry=here["accelerators"] == 0)
        with ThreadPoolExecutor(1 if here["accelerators"] == 0 else AT_ONCE) as pool:
            list(pool.map(lambda step: run(step, here["accelerators"] == 0), steps))
        cases = [case for step in steps for case in read(step, Path(folder))]
        figures = Path(folder) / "figures.json"
        quick = [] if here["accelerators"] else ["--quick"]
        measured = Step("benchmarks/gpu.py", [str(ROOT / "benchmarks/gpu.py"), *quick, "--json", str(figures)])
        run(measured, here["accelerators"] == 0)
        steps.append(measured)
        rows = json.loads(figures.read_text())["rows"] if figures.exists() else []
    here["minutes"] = round((time.monotonic() - begun) / 60, 1)
    text = written(here, steps)
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.md").write_text(text)
        report = {"facts": here, "steps": [asdict(step) for step in steps], "figures": rows}
        (args.out / "report.json").write_text(json.dumps(report, indent=1))
        root = ElementTree.Element("testsuites")
        root.extend(cases)
        ElementTree.ElementTree(root).write(args.out / "junit.xml")
    return int(any(step.how != "passed" for step in steps))


def facts() -> dict[str, Any]:
    """Return what the figures and the failures depend on."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "accelerators": count,
        "missing": [name for name in HELPFUL if importlib.util.find_spec(name) is None],
    }
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found |= {"card": torch.cuda.get_device_name(), "driver": driver[:1], "cuda": torch.version.cuda, "nccl": nccl}
    return found


def test_files() -> list[str]:
    """Return the files in which a test is marked for a GPU."""
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.(gpu|cuda)\b", file.read_text())]
    files.sort(key=lambda file: -file.stat().st_size)  # what takes longest begins first
    return [str(file.relative_to(ROOT)) for file in files]


def tests(folder: Path, files: list[str], *, dry: bool) -> list[Step]:
    """Return a step for each file; without accelerators one for all, since pretended ones are shared."""
    options = ["-m", "pytest", "-v", "--tb=short", "--tier", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        options += ["--timeout", "60" if not dry else "300"]
    if not dry and importlib.util.find_spec("xdist") is not None:
        options += ["-n", "3"]
    groups = {"tests for a GPU": files} if dry else {file: [file] for file in files}
    return [
        Step(name, [*options, f"--junitxml={folder / str(number)}.xml", *group])
        for number, (name, group) in enumerate(groups.items())
    ]


def run(step: Step, dry: bool) -> None:
    """Run a step, and note in it how it went."""
    begun, limit = time.monotonic(), SECONDS_DRY if dry else SECONDS
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with subprocess.Popen(
        [sys.executable, *step.words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            step.output = process.communicate(timeout=limit)[0]
            # 5: all tests of a file were left out, as they need several devices
            step.how = "passed" if process.returncode in (0, 5) else f"FAILED with {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            step.how, step.output = f"NOT DONE in {limit} s", process.communicate()[0]
    step.seconds = round(time.monotonic() - begun, 1)
    lines = step.output.splitlines()
    step.output = "\n".join(lines[-25:] if "pytest" in step.words else lines)


def read(step: Step, folder: Path) -> Iterator[ElementTree.Element]:
    """Note in a step of tests what each test did; yield its suites."""
    (path,) = (word.partition("=")[2] for word in step.words if word.startswith("--junitxml="))
    if not Path(path).exists():
        return
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        yield suite
        for case in suite.iter("testcase"):
            bad = case.find("failure") if case.find("failure") is not None else case.find("error")
            kind = "failed" if bad is not None else "skipped" if case.find("skipped") is not None else "passed"
            step.counts[kind] = step.counts.get(kind, 0) + 1
            if bad is not None:
                name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
                step.failures.append(f"{name}: {str(bad.get('message')).splitlines()[0][:300]}")


def written(here: dict[str, Any], steps: list[Step]) -> str:
    """Return the report for a reader, in Markdown."""
    first = "on real accelerators" if here["accelerators"] else "DRY: pretended devices, and figures of the CPU"
    lines = [f"# GPU report: {first}", ""]
    lines += [f"- {name}: {value}" for name, value in here.items() if value not in ([], None)]
    lines += ["", "| | | s | passed | failed | skipped |", "|---|---|---|---|---|---|"]
    for step in steps:
        counts = " | ".join(str(step.counts.get(kind, "")) for kind in ("passed", "failed", "skipped"))
        lines.append(f"| {step.name} | {step.how} | {step.seconds} | {counts} |")
    for step in steps:
        if step.how != "passed" or not step.counts:
            lines += ["", f"## {step.name}", "", *(f"- {failure}" for failure in step.failures)]
            lines += ["", "```text", step.output, "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
