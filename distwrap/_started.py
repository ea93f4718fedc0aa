"""How this process was started: the folder in which it imported distwrap, before a script goes elsewhere."""

import os
import sys
from pathlib import PurePath

FOLDER = os.getcwd()


def is_command_line() -> bool:
    """Return whether the program is distwrap's own command, which imports torch where it needs it."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word == "-m":
            return next(words, "") == "distwrap"
        if word in ("-X", "-W"):
            next(words, "")
        elif not word.startswith("-"):
            return PurePath(word).stem == "distwrap"
    return False
