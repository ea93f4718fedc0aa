"""``python -m distwrap``, which is the same as the command ``distwrap``."""

import sys

from distwrap.cli import main

if __name__ == "__main__":
    sys.exit(main())
