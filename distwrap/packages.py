"""Optional packages: whether one is installed, asked without importing it."""

from importlib.util import find_spec

from distwrap.errors import DistwrapError, OptionError


def require_package(
    name: str,
    what: str,
    otherwise: str = "",
    *,
    extra: str = "",
    distribution: str = "",
    error: type[DistwrapError] = OptionError,
) -> None:
    """Refuse what needs a package that is not installed, before any process starts.

    Args:
        name: of the package.
        what: needs it, as ``"strategy='deepspeed'"``.
        otherwise: what can be used without it.
        extra: the extra of distwrap that installs it; by default the package's name.
        distribution: which brings the package; by default the package's name.
        error: the class of the error.

    Raises:
        DistwrapError: gives the line that installs it; by default an OptionError.

    Example:
        >>> require_package("torch", "a model")
    """
    if find_spec(name) is None:
        way = f", or use {otherwise}" if otherwise else ""
        raise error(
            f"{what} needs the package {distribution or name!r}, which is not installed: "
            f"pip install 'distwrap[{extra or name}]'{way}."
        )
