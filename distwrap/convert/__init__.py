"""Conversion of scripts to distwrap, and a check of scripts: both read the code, and never run it."""

from distwrap.errors import ConversionError
from distwrap.packages import require_package


def require_libcst() -> None:
    """Refuse to read scripts where the package that reads them is not installed.

    Raises:
        ConversionError: gives the line that installs it.
    """
    require_package("libcst", "reading scripts", extra="convert", error=ConversionError)
