"""``python -m distwrap``."""

import sys

from distwrap.cli import main

if __name__ == "__main__":
    sys.exit(main())
