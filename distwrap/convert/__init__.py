"""Conversion of scripts to distwrap, and a check of scripts: both read the code, and never run it."""

from importlib.util import find_spec

from distwrap.errors import ConversionError


def require_libcst() -> None:
    """Refuse to read scripts where the package that reads them is not installed.

    Raises:
        ConversionError: gives the line that installs it.
    """
    if find_spec("libcst") is None:
        raise ConversionError(
            "reading scripts needs the package 'libcst', which is not installed: pip install 'distwrap[convert]'."
        )
