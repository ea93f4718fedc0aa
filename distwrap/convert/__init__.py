"""Convert and check scripts for distwrap; both read the code and never run it."""

from distwrap.errors import ConversionError
from distwrap.packages import require_package


def require_libcst() -> None:
    """Raise an error if libcst, which reads the scripts, is not installed.

    Raises:
        ConversionError: libcst is not installed; the message gives the command that installs it.
    """
    require_package("libcst", "reading scripts", extra="convert", error=ConversionError)
