"""List the public names in the package's docstring, each with its first line: for ``help(distwrap)``.

python docs/list_names.py            # writes the list into distwrap/__init__.py
python docs/list_names.py --check    # exits with 1 where the list is not that of the code
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path

import distwrap

PACKAGE = Path(__file__).parent.parent / "distwrap" / "__init__.py"
BEGIN = "Each name has a help of its own, as in ``help(distwrap.wrap_model)``:\n"
END = '"""\n'
WIDTH = 119


def listed() -> str:
    """Return the list of the public names."""
    lines = []
    for name in distwrap._PUBLIC:
        first = (inspect.getdoc(getattr(distwrap, name)) or "").partition("\n")[0]
        text = f"{name}: {first}"
        lines += textwrap.wrap(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the list, or compare it."""
    source = PACKAGE.read_text()
    before, rest = source.split(BEGIN, 1)
    written = f"{before}{BEGIN}\n{listed()}{END}{rest.split(END, 1)[1]}"
    if "--check" in sys.argv:
        if written != source:
            print("the names in distwrap's docstring are not those of the code: run python docs/list_names.py")
        return int(written != source)
    PACKAGE.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
