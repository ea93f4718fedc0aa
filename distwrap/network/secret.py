"""The secret of a run, which its ranks have and no other user: where they take it from.

It is never in a store, where anybody who connects could read it. Ranks that one of our launchers starts on one node
inherit it. Others take it from the file that DISTWRAP_SECRET_FILE names, from rank 0's memory, which the kernel shows
to processes of the same user, or, under Slurm, from a credential of munge's, which the same user alone can decode.
"""

import hashlib
import hmac
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
from contextlib import ExitStack, suppress

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.environments import Placement
from distwrap.errors import ArrivalError, OptionError
from distwrap.network import memory_file
from distwrap.network.keys import read, read_all, set_all
from distwrap.options import SECRET_FILE

SIZE = 32  # bytes of a secret, and of a signature
_MUNGE_SECONDS = 10.0
_REPLAYED = 17  # munge's word for a credential that another rank of this node has decoded before
_PREFIX = "distwrap-secret"


def new() -> bytes:
    """Return a fresh secret."""
    return secrets.token_bytes(SIZE)


def signature(data: bytes, secret: bytes) -> bytes:
    """Return the HMAC signature of data (HMAC-SHA256, RFC 2104)."""
    return hmac.digest(secret, data, "sha256")


def of_file() -> bytes:
    """Return what the user's file of a secret holds; empty where the user has named none.

    Raises:
        OptionError: the file cannot be read, is not this user's alone, or is too short.
    """
    path = os.environ.get(SECRET_FILE)
    if not path:
        return b""
    path = os.path.expanduser(path)  # the shell leaves ~ alone in quotes, and other launchers everywhere
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:  # a FIFO waits
            status = os.fstat(file.fileno())
            content = file.read(4096).strip() if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise OptionError(f"{SECRET_FILE}={path!r} cannot be read: {error.strerror}.") from error
    problem = ""
    if status.st_uid not in (0, os.geteuid()):
        problem = f"it belongs to another user (number {status.st_uid})"
    elif status.st_mode & 0o077:
        problem = f"others may read or write it (mode {status.st_mode & 0o777:o}). Say `chmod 600 {path}`"
    elif not stat.S_ISREG(status.st_mode):
        problem = "it is no file"
    elif len(content) < 16:
        problem = f"it holds {len(content)} bytes, where at least 16 are needed. Say `openssl rand -hex 32 > {path}`"
    if problem:
        raise OptionError(f"{SECRET_FILE}={path!r} keeps no secret: {problem}.")
    return content


def agree_on_secret(store: Store, placement: Placement) -> bytes:
    """Return a secret that only ranks of this run have; empty where not all of them can have it. Every rank calls it.

    What goes through the store is no secret: a random number that makes runs of one file differ, the place in rank 0's
    memory, or the credential; and rank 0's answer to each rank's challenge, which shows that both have the same secret.

    Raises:
        ArrivalError: not all ranks have the same one, or one's file keeps none; on every rank.
    """
    given, rank, problem = b"", placement.rank, ""
    try:
        given = of_file()
    except OptionError as error:  # which the others, who would wait for this rank, hear of too
        problem = f"rank {rank} on {socket.gethostname()} has no secret ({error})"
        store.compare_set("secret/lacking", "", problem)
    with ExitStack() as stack:
        if rank == 0:
            secret, offer = (b"", "none") if problem else _offer(placement, given, stack)
            store.set("secret/offer", offer)
            _answer(store, placement.world_size, secret)
        else:
            offer = store.get("secret/offer").decode()
            secret = b"" if problem else _taken(offer, given)
            secret = secret if _is_of_now(store, rank, secret) else b""
        zero_has_file = offer.startswith("file ")
        if not secret:
            mine = "none" if not given else "another" if zero_has_file else "one"
            zeros = "one" if zero_has_file else "none"
            differs = f"rank {rank} on {socket.gethostname()} has {mine}, and rank 0 has {zeros}"
            store.compare_set("secret/lacking", "", differs if given or zero_has_file else "")
        if store.add("secret/seen", 1) == placement.world_size:
            store.set("secret/agreed", "no" if store.check(["secret/lacking"]) else "yes")
        if store.get("secret/agreed") == b"yes" and secret:
            return secret
    differs = read(store, "secret/lacking").decode().rstrip(".")
    if differs or given:  # whoever reaches the store can say that there is none
        differs = (
            differs or "the ranks' store says that a rank has no secret, which another program may have written there"
        )
        raise ArrivalError(f"{SECRET_FILE} must name the same secret on all ranks: {differs}.")
    return b""


def _is_of_now(store: Store, rank: int, secret: bytes) -> bool:
    """Return whether rank 0 has the secret now: the offer may be one of an earlier run, which somebody has kept."""
    challenge = secrets.token_hex(16)
    store.set(f"secret/challenge/{rank}", challenge)
    answer = store.get(f"secret/answer/{rank}").decode(errors="replace")
    return hmac.compare_digest(answer.encode(), _response(challenge.encode(), secret).encode())


def _answer(store: Store, world_size: int, secret: bytes) -> None:
    """Show each rank that this one, rank 0, has the secret."""
    others = range(1, world_size)
    challenges = read_all(store, [f"secret/challenge/{rank}" for rank in others]) if others else []
    answers = zip(others, challenges, strict=True)
    set_all(store, {f"secret/answer/{rank}": _response(challenge, secret) for rank, challenge in answers})


def _response(challenge: bytes, secret: bytes) -> str:
    """Return the signature of a challenge's hash: of the challenge itself, anybody could have any text signed."""
    return signature(hashlib.sha256(challenge).digest(), secret).hex()


def _offer(placement: Placement, given: bytes, stack: ExitStack) -> tuple[bytes, str]:
    """Return a secret, and where the other ranks find it as long as the stack is open."""
    secret = new()
    if given:
        return signature(secret, given), f"file {secret.hex()}"
    if placement.nnodes == 1 and memory_file.ARE_POSSIBLE:
        fd = memory_file.make(_PREFIX)
        stack.callback(os.close, fd)
        os.write(fd, secret)
        return secret, f"memory {memory_file.path_of(fd)}"
    if placement.nnodes > 1 and "SLURM_JOB_ID" in os.environ and shutil.which("munge"):
        with suppress(OSError, subprocess.TimeoutExpired):
            done = _run(["munge", f"--restrict-uid={os.geteuid()}"], f"{_PREFIX} {secret.hex()}")
            if done.returncode == 0:
                return secret, f"munge {done.stdout.strip()}"
    return b"", "none"


def _taken(offer: str, given: bytes) -> bytes:
    """Return the secret that rank 0 offers; empty where this process cannot have it, or another user offers it."""
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        way, _, place = offer.partition(" ")
        if given:  # which no word of the store can make this rank do without
            return signature(bytes.fromhex(place), given) if way == "file" else b""
        if way == "memory":
            with open(memory_file.open_own(place, _PREFIX), "rb") as memory:
                return memory.read(SIZE)
        if way == "munge":
            return _from_munge(place)
    return b""


def _from_munge(credential: str) -> bytes:
    """Decode a credential that this user has encoded; of another user's nothing."""
    done = _run(["unmunge"], credential)
    user = re.search(r"^UID:.*\((\d+)\)$", done.stdout, re.MULTILINE)
    content = re.search(rf"^{_PREFIX} (\w+)$", done.stdout, re.MULTILINE)
    if done.returncode not in (0, _REPLAYED) or user is None or content is None or int(user[1]) != os.geteuid():
        return b""
    return bytes.fromhex(content[1])


def _run(command: list[str], text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=_MUNGE_SECONDS)
