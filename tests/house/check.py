"""Check what is to be read in files alone, the package's and the documentation's: `python -m tests.house.check`.

It parses each file once, imports no torch, and prints what is wrong. Each rule sees to it that it finds what is planted
for it.
"""

from __future__ import annotations

import sys

from tests.house import layers, pages, private_names, replaced, size, versions
from tests.house.package import trees


def main() -> int:
    """Print what is wrong, and return 1 where something is."""
    found = [
        problem for rule in (layers, private_names, replaced, size, versions) for problem in rule.problems(trees())
    ]
    found += pages.problems()
    print("\n".join(found) or "The house is in order.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
