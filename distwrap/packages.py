"""Packages of other engines: whether one is installed, asked without importing it."""

from importlib.util import find_spec

from distwrap.errors import OptionError


def require_package(name: str, what: str, otherwise: str = "") -> None:
    """Refuse an option whose package is not installed, before any process starts.

    Args:
        name: of the package, which is also that of our extra.
        what: needs it, as ``"strategy='deepspeed'"``.
        otherwise: what can be used without it.

    Raises:
        OptionError: gives the line that installs it.

    Example:
        >>> require_package("torch", "a model")
    """
    if find_spec(name) is None:
        way = f", or use {otherwise}" if otherwise else ""
        raise OptionError(
            f"{what} needs the package {name!r}, which is not installed: pip install 'distwrap[{name}]'{way}."
        )
