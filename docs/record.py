"""Record a command in a terminal as an SVG, whose lines appear as they were printed.

    python docs/record.py docs/pictures/demo.svg --shown "make demo" -- .venv/bin/python examples/demo.py

The picture needs nothing but itself: its animation is CSS, and where that is not played, or where people have asked for
less motion, the whole text stands there. The home folder is written as ~, or another one that `--home` names.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

LINE, LETTER, MARGIN, TOP = 19, 7.83, 18, 38  # pixels; a letter's width is that of 13 pixels of a monospaced font
CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]")

STYLE = """\
  .screen { fill: #17202b; }
  text { fill: #dfe6ee; font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre; }
  .typed { fill: #7fd1a6; font-weight: bold; }
  .dot { fill: #46566a; }
  @media (prefers-reduced-motion: no-preference) {
    .late { animation: appear 0.15s both; }
    @keyframes appear { from { opacity: 0; } }
  }
"""


def record(command: Sequence[str], columns: int, seconds: float) -> tuple[list[tuple[float, str]], int]:
    """Run a command in a terminal, and return its lines with the seconds at which they came, and its exit status."""
    ours, theirs = pty.openpty()
    began = time.monotonic()
    env = {**os.environ, "COLUMNS": str(columns), "TERM": "dumb"}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        chunks = []
        while True:
            if not select.select([ours], [], [], max(0.0, began + seconds - time.monotonic()))[0]:
                process.kill()
                break
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            chunks.append((time.monotonic() - began, chunk))
        os.close(ours)
    return list(lines_of(chunks)), process.returncode


def lines_of(chunks: Iterable[tuple[float, bytes]]) -> Iterable[tuple[float, str]]:
    """Yield each whole line as a terminal shows it at its end, with the time at which it ended."""
    rest = b""
    at = 0.0
    for at, chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield at, _shown(line)
    if rest:
        yield at, _shown(rest)


def _shown(line: bytes) -> str:
    """Return a line without colours, and only what a carriage return has left of it."""
    return CONTROLS.sub("", line.decode(errors="replace")).rstrip("\r").rpartition("\r")[2].expandtabs()


def rows_of(line: str, columns: int) -> list[str]:
    """Return the rows that a line takes in a terminal."""
    return [line[start : start + columns] for start in range(0, len(line), columns)] or [""]


def svg(shown: str, lines: Sequence[tuple[float, str]], speed: float) -> str:
    """Return the picture.

    Args:
        shown: the command as the picture shows it.
        lines: what was printed, and when.
        speed: how many times faster than they came the lines appear.
    """
    longest = max(len(text) for text in (f"$ {shown}", *(text for _, text in lines)))
    width, height = longest * LETTER + 2 * MARGIN, TOP + (len(lines) + 1) * LINE + MARGIN
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img">',
        f"<title>What {escape(shown)} prints</title>",
        f"<style>\n{STYLE}</style>",
        f'<rect class="screen" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
        *(f'<circle class="dot" cx="{x}" cy="18" r="5"/>' for x in (22, 40, 58)),
        f'<text class="typed" xml:space="preserve" x="{MARGIN}" y="{TOP + 13}">$ {escape(shown)}</text>',
    ]
    for number, (at, text) in enumerate(lines, 1):
        if text.strip():
            later, y = f"animation-delay: {0.5 + at / speed:.2f}s", TOP + 13 + number * LINE
            drawn.append(
                f'<text class="late" style="{later}" xml:space="preserve" x="{MARGIN}" y="{y}">{escape(text)}</text>'
            )
    return "\n".join([*drawn, "</svg>", ""])


def main() -> int:
    """Record, and write the picture."""
    parser = argparse.ArgumentParser(description="Record a command in a terminal as an SVG.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--shown", help="the command as the picture shows it; by default as it is run")
    parser.add_argument("--home", default=str(Path.home()), help="a folder that is written as ~")
    parser.add_argument("--columns", type=int, default=112, help="letters that the terminal is wide")
    parser.add_argument("--speed", type=float, default=4.0, help="how many times faster the lines appear")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which the command is ended")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    lines, status = record(args.command, columns=args.columns, seconds=args.limit)
    if status:
        print("\n".join(text for _, text in lines))
        print(f"The command ended with {status}: nothing is written.", file=sys.stderr)
        return 1
    lines = [(at, row) for at, text in lines for row in rows_of(text.replace(args.home, "~"), args.columns)]
    args.picture.write_text(svg(args.shown or " ".join(args.command), lines, args.speed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
