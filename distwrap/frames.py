"""Which frames are distwrap's own, and whether tracebacks show them."""

import os
import sys
from collections.abc import Mapping

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
VARIABLE = "DISTWRAP_TRACEBACK"
WORDS = ("", "short", "full")

# Bodies of tests: their frames tell whoever makes a strategy what it does wrong.
_BODIES = os.path.join(OURS, "testing", "behaviours", "")


def is_ours(file: str) -> bool:
    """Return whether the frames of a file are distwrap's own, which explain nothing to its users."""
    return file.startswith(OURS) and not file.startswith(_BODIES)


def are_left_out(error: object = None) -> bool:
    """Return whether tracebacks leave frames of ours out; ``DISTWRAP_TRACEBACK=full`` shows them.

    Args:
        error: what pytest gives; it makes no difference.
    """
    return word_of(os.environ) != "full"


def word_of(env: Mapping[str, str]) -> str:
    """Return what the variable says, which is right if it is one of `WORDS`."""
    return env.get(VARIABLE, "").strip().lower()


def hide_from_pytest() -> None:
    """Let pytest, where it runs, leave out the frames of those modules of ours that are imported by now."""
    if "pytest" in sys.modules:
        for name, module in list(sys.modules.items()):
            if name.startswith("distwrap.") and is_ours(getattr(module, "__file__", None) or ""):
                vars(module)["__tracebackhide__"] = are_left_out
