"""Variables: reading of whole numbers, of all or none of a set, of where the ranks meet; and setting for a while."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from distwrap.errors import PlacementError

DEFAULT_PORT = 29500  # torch's own, where an address is given without a port


def read_int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable's whole number.

    Raises:
        PlacementError: the text is not a whole number.
    """
    if default is not None and name not in env:
        return default
    try:
        return int(env[name])
    except ValueError:
        raise PlacementError(f"{name}={env[name]!r} is not a whole number.") from None


def quote(env: Mapping[str, str], names: Sequence[str]) -> str:
    """Return those of the variables that are set, with their values."""
    return ", ".join(f"{name}={env[name]}" for name in names if name in env)


def require(env: Mapping[str, str], names: Sequence[str], launcher: str) -> None:
    """Raise a PlacementError that lists what is there and what is not if any of the variables is missing."""
    missing = [name for name in names if name not in env]
    if missing:
        raise PlacementError(
            f"the environment is half set for {launcher}: it has {quote(env, names)}, but not {', '.join(missing)}. "
            f"Start the script with {launcher} itself, or unset these variables."
        )


def meeting_point(
    env: Mapping[str, str], nnodes: int, first_host: str | None, job: str, launcher: str
) -> tuple[str, int | None]:
    """Return the address and port at which ranks meet whose launcher has no meeting point of its own.

    MASTER_ADDR and MASTER_PORT are the user's choice. Without them the ranks of one node meet on loopback, and others
    on the node of rank 0, at a port that follows from the job.

    Raises:
        PlacementError: the node of rank 0 is not known.
    """
    port = read_int(env, "MASTER_PORT") if env.get("MASTER_PORT") else None
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if nnodes == 1 else first_host)
    if address is None:
        raise PlacementError(
            f"{launcher} started ranks on {nnodes} nodes, but does not say which one has rank 0: export MASTER_ADDR, "
            f"the name of that node, and MASTER_PORT, a free port there such as {DEFAULT_PORT}, to all ranks "
            f"(mpirun -x MASTER_ADDR=host -x MASTER_PORT={DEFAULT_PORT} …; mpiexec -genv MASTER_ADDR host …)."
        )
    if port is None and nnodes > 1 and not job:
        port = DEFAULT_PORT
    return address, port


@contextmanager
def variables_set(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for the time of a ``with``."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
