"""How this process was started: where it imported distwrap, and whether it runs a script again, as another rank."""

import os
import sys
from pathlib import PurePath

FOLDER = os.getcwd()  # before a script goes elsewhere

if "DISTWRAP_SCRIPT_FD" in os.environ:
    from distwrap.standard_input import leave_in_script

    leave_in_script(os.environ["DISTWRAP_SCRIPT_FD"], os.environ.get("RANK", "0"))


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
