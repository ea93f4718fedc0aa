"""Read variables strictly: whole numbers, all or none of a set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distwrap.errors import PlacementError

DEFAULT_PORT = 29500  # torch's own, where an address is given without a port


def whole(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a whole number.

    Raises:
        PlacementError: it is none.
    """
    if default is not None and name not in env:
        return default
    try:
        return int(env[name])
    except ValueError:
        raise PlacementError(f"{name}={env[name]!r} is not a whole number.") from None


def quoted(env: Mapping[str, str], names: Sequence[str]) -> str:
    """Quote those of the variables that are set."""
    return ", ".join(f"{name}={env[name]}" for name in names if name in env)


def require(env: Mapping[str, str], names: Sequence[str], launcher: str) -> None:
    """Refuse a half-set environment, by listing what is there and what is not."""
    missing = [name for name in names if name not in env]
    if missing:
        raise PlacementError(
            f"the environment is half set for {launcher}: it has {quoted(env, names)}, but not {', '.join(missing)}. "
            f"Start the script with {launcher} itself, or unset these variables."
        )


def meeting_point(
    env: Mapping[str, str], nnodes: int, first_host: str | None, job: str, launcher: str
) -> tuple[str, int | None]:
    """Say where ranks meet that a launcher without a meeting place of its own has started.

    MASTER_ADDR and MASTER_PORT are the user's word. Else ranks of one machine meet on loopback, others on the machine
    of rank 0, at a port that follows from the job.

    Raises:
        PlacementError: nobody knows the machine of rank 0.
    """
    port = whole(env, "MASTER_PORT") if env.get("MASTER_PORT") else None
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if nnodes == 1 else first_host)
    if address is None:
        raise PlacementError(
            f"{launcher} started ranks on {nnodes} machines, but does not say which one has rank 0: export "
            f"MASTER_ADDR, the name of that machine, and MASTER_PORT, a free port there such as {DEFAULT_PORT}, to all "
            f"ranks (mpirun -x MASTER_ADDR=host -x MASTER_PORT={DEFAULT_PORT} …; mpiexec -genv MASTER_ADDR host …)."
        )
    if port is None and nnodes > 1 and not job:
        port = DEFAULT_PORT
    return address, port
