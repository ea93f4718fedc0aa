"""`make gpu-report`: show on this machine's accelerators what tests, README and an example show.

Each step is a process of its own with a limit, and its result one line of the report. Where there is no accelerator the
report is dry: tests run on pretended devices, programs on the CPU, and the first line says so.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
SECONDS = 400  # for each step; a compiler works a minute of it where there is no accelerator


def readme_program() -> str:
    """Return the whole program that README shows."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if "if __name__" in block)


def main() -> int:
    """Run the steps, print the report, and return 1 if one of them has failed."""
    found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    kind = torch.accelerator.current_accelerator() if found else None
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else kind
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {found} accelerators: {name or 'none: dry'}")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "readme.py"
        program.write_text(readme_program())
        steps = {
            "tests marked gpu or cuda": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tier", "gpu", "tests"],
            "README's program": [str(program)],
            "examples/digits.py": [str(ROOT / "examples/digits.py"), "--epochs", "1", "--out", f"{folder}/digits.pt"],
        }
        passed = [_shown(step, words) for step, words in steps.items()]
        return int(not all(passed))


def _shown(step: str, words: list[str]) -> bool:
    """Run a step, print a line for it and its last lines, and return whether it has passed."""
    begun = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            text = process.communicate(timeout=SECONDS)[0]
            how = "passed" if process.returncode == 0 else f"FAILED with {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            how, text = f"NOT DONE in {SECONDS} s", process.communicate()[0]
    print(f"{step}: {how}, {time.monotonic() - begun:.0f} s")
    for line in text.splitlines()[-2 if how == "passed" else -30 :]:
        print(f"    {line}")
    return how == "passed"


if __name__ == "__main__":
    sys.exit(main())
