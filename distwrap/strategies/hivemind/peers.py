"""Ranks of a run as peers of hivemind: each has a distributed hash table (DHT), which peers of other runs share.

hivemind forks processes, which end with the rank, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from distwrap import locked_folder
from distwrap._internals.packages import put_sockets_in
from distwrap.errors import LaunchError, ModelError, OptionError
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.world import RunPart, World, say
from distwrap.wording import first_line

_forking = threading.local()  # its `parent` is set while hivemind forks


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Let hivemind fork its processes within a ``with``, also from a daemonic process, with any start method.

    hivemind also makes this process ignore Ctrl-C, which is undone here.
    """
    _end_forks_with_parent()
    me, method = multiprocessing.current_process(), multiprocessing.get_start_method(allow_none=True)
    is_daemon, on_interrupt = me.daemon, signal.getsignal(signal.SIGINT)
    multiprocessing.set_start_method("fork", force=True)
    _forking.parent = os.getpid()
    try:
        me.daemon = False
        yield
    finally:
        del _forking.parent
        me.daemon = is_daemon
        multiprocessing.set_start_method(method, force=True)
        signal.signal(signal.SIGINT, on_interrupt if on_interrupt is not None else signal.default_int_handler)


@functools.cache
def _end_forks_with_parent() -> None:
    os.register_at_fork(after_in_child=_in_fork)


def _in_fork() -> None:
    """End a process forked by hivemind together with its parent."""
    parent = _forking.__dict__.pop("parent", None)
    if parent is None:
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # hivemind uses it for processes that do not end
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended meanwhile
        os._exit(1)


_KIND, _PLACE = "peer", "/tmp"  # of the folder of hivemind's sockets, whose names are limited
_LOOK_SECONDS = 0.2
_CLOSE_SECONDS = 10.0
_MEMBER_SECONDS = 24 * 3600.0  # for which others can read a run's settings
_LOOPBACK = {"nat_port_map": False, "auto_nat": False, "use_relay": False}


class Peers(RunPart):
    """DHT of this rank, from the first optimizer of a run to its end.

    Attributes:
        dht: hivemind's DHT, once it exists.
        ids: hivemind's peer ids of the ranks of this run.
        options: the strategy that has started it.
    """

    dht: Any
    options: Any

    def __init__(self, world: World) -> None:
        self._world = world
        self.ids: list[str] = []
        self.dht = None
        self._end = contextlib.ExitStack()

    @property
    def here(self) -> str:
        """A name of this rank, for messages."""
        return f"rank {self._world.placement.rank} on {socket.gethostname()}"

    def start(self, options: Any) -> None:
        """Start this rank's peer; every rank calls it, and later calls do nothing.

        Raises:
            OptionError: another optimizer of this run has other options.
            LaunchError: hivemind did not start.
            ModelError: called in another thread than the main one.
        """
        if self.dht is not None:
            if repr(options) != repr(self.options):
                raise OptionError(
                    f"{self.here}: HivemindStrategy was given other options here than earlier in this run, and "
                    f"a run has one set of peers: {options} against {self.options}."
                )
            return
        if threading.current_thread() is not threading.main_thread():
            raise ModelError(f"{self.here}: hivemind's processes must be started in the main thread of a process.")
        self.options, rank = options, self._world.placement.rank
        with forking():
            import hivemind  # within forking(), so that its locks are those of fork
        if not options.verbose and "HIVEMIND_LOGLEVEL" not in os.environ:
            logging.getLogger("hivemind").setLevel(logging.CRITICAL)
        locked_folder.remove_abandoned(_KIND, place=_PLACE)
        folder = locked_folder.make(_KIND, _PLACE)
        self._end.callback(locked_folder.remove, folder)
        self._end.callback(put_sockets_in, put_sockets_in(f"/unix{folder}/"))
        dht: Any = self._started(hivemind, options.initial_peers) if rank == 0 else None
        first: list[str] = broadcast([str(each) for each in dht.get_visible_maddrs()] if dht else [])
        self.dht = dht or self._started(hivemind, options.initial_peers if options.client_mode else first)
        self.ids = gather_object(str(self.dht.peer_id))
        size, inside = self._world.placement.world_size, all("/127.0.0.1/" in each for each in first)
        say(
            f"hivemind: {size} peer{'s' if size > 1 else ''} of run_id={options.run_id!r}. Another run joins"
            f"{' (on this machine; host=0.0.0.0 lets others join)' if inside else ''} with: "
            f"HivemindStrategy(initial_peers={first}, run_id={options.run_id!r}, "
            f"target_batch_size={options.target(size)}, batch_size=…)"
        )

    def _started(self, hivemind: Any, initial_peers: Any) -> Any:
        options = self.options
        inside = self._world.placement.nnodes == 1 and not options.initial_peers
        host = {"auto": "127.0.0.1" if inside else "0.0.0.0", "loopback": "127.0.0.1"}.get(options.host, options.host)
        with forking():
            dht = hivemind.DHT(
                initial_peers=list(initial_peers),
                start=False,
                client_mode=options.client_mode,
                host_maddrs=[f"/ip4/{host}/tcp/0"],
                **(_LOOPBACK if host == "127.0.0.1" else {}),
            )
            try:
                dht.run_in_background(timeout=options.peer_seconds)
            except Exception as error:  # noqa: BLE001 - any of hivemind's
                dht.kill()
                known = f" with initial_peers={list(initial_peers)}" if initial_peers else ""
                raise LaunchError(
                    f"{self.here}: hivemind did not start{known}: {type(error).__name__}: {first_line(error)}. "
                    "Are the peers running, and can this node reach them? A run prints its addresses at each start, "
                    "and they change."
                ) from None
        return dht

    def meet_members(self, key: str, how: list[Any]) -> None:
        """Publish this run's settings for peers of other runs, and check that theirs are the same.

        Args:
            key: a key for what is trained.
            how: the target and the shapes of the model, which must be the same.

        Raises:
            LaunchError: this run should join others, and finds no peer that trains this.
            ModelError: they have other settings.
        """
        from hivemind.utils import get_dht_time

        options, name = self.options, f"{key}_members"
        deadline = time.monotonic() + options.peer_seconds
        while not (others := [value for peer, value in self._entries(name) if peer not in self.ids]):
            if not options.initial_peers or self._entries(f"{key}_progress"):
                break
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{self.here}: reached peers at initial_peers={list(options.initial_peers)}, but found none that "
                    f"trains run_id={options.run_id!r} within peer_seconds={options.peer_seconds:g}. Give the run_id "
                    "that the other run prints."
                )
            time.sleep(_LOOK_SECONDS)
        for other in others:
            if list(other) != how:
                theirs, ours = (f"target_batch_size={target} and a model of shapes {it}" for target, it in (other, how))
                raise ModelError(
                    f"{self.here}: a peer of another run trains run_id={options.run_id!r} with {theirs}, and this run "
                    f"with {ours}. Make them alike, or give another run_id."
                )
        expires = get_dht_time() + _MEMBER_SECONDS
        self._within(self.dht.store(name, how, expires, subkey=str(self.dht.peer_id), return_future=True))

    def _entries(self, key: str) -> list[tuple[Any, Any]]:
        """Return the DHT's entries under a key, with their sub-keys."""
        values = getattr(self._within(self.dht.get(key, latest=True, return_future=True)), "value", None)
        return [(name, item.value) for name, item in values.items()] if isinstance(values, dict) else []

    def _within(self, future: Any) -> Any:
        """Return the result of one of hivemind's futures within `peer_seconds`, or ``None`` if it fails."""
        with contextlib.suppress(Exception):  # it is tried again, or the missing entry is reported
            return future.result(self.options.peer_seconds)
        return None

    def close(self) -> None:
        dht, self.dht = self.dht, None
        if dht is not None:
            with contextlib.suppress(Exception):  # what is left of it is killed
                dht.shutdown()
            dht.kill()
            dht.join(_CLOSE_SECONDS)
        self._end.close()
