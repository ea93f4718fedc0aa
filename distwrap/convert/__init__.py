"""Convert and check scripts for distwrap; both read the code and never run it."""

from importlib.util import find_spec

from distwrap.errors import ConversionError


def require_libcst() -> None:
    """Raise an error if libcst, which reads the scripts, is not installed.

    Raises:
        ConversionError: libcst is not installed; the message gives the command that installs it.
    """
    if find_spec("libcst") is None:
        raise ConversionError(
            "reading scripts needs the package 'libcst', which is not installed: pip install 'distwrap[convert]'."
        )
