"""Ranks of a run as peers of hivemind: each has a distributed hash table (DHT), and must see the others in it.

hivemind does not check this: peers that do not find each other would silently train apart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from distwrap.errors import LaunchError, ModelError, OptionError
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.world import RunPart, World, say
from distwrap.strategies.hivemind.daemons import SocketFolder, forking
from distwrap.strategies.hivemind.options import HivemindOptions
from distwrap.wording import first_line, named_ranks

_TRIES = 3
_START_SECONDS = 20.0  # of an attempt; hivemind's own process takes half a second
_GOODBYE_SECONDS = 2.0
_LOOK_SECONDS = 0.2
_MEMBER_SECONDS = 24 * 3600.0  # for which others can read a run's settings, unless it ends
_LOOPBACK = {"nat_port_map": False, "auto_nat": False, "use_relay": False}


class Peers(RunPart):
    """DHT of this rank, from the first model of a run to its end.

    Attributes:
        dht: hivemind's DHT, once it exists.
        ids: hivemind's peer ids of the ranks of this run.
        options: the options of the strategy that has started it.
    """

    dht: Any = None

    def __init__(self, world: World) -> None:
        self._world = world
        self.ids: list[str] = []
        self.options = HivemindOptions()
        self._folder: SocketFolder | None = None
        self._member_key = ""

    @property
    def here(self) -> str:
        """A name of this rank, for messages."""
        return f"rank {self._world.placement.rank} on {socket.gethostname()}"

    def start(self, options: HivemindOptions) -> None:
        """Start this rank's peer, and wait for the others; every rank calls it, and later calls do nothing.

        Raises:
            OptionError: another model of this run has other options.
            LaunchError: hivemind did not start, or a rank does not see another.
            ModelError: called in another thread than the main one.
        """
        if self.dht is not None:
            if options != self.options:
                raise OptionError(
                    f"{self.here}: HivemindStrategy was given other options here than earlier in this run, and "
                    f"a run has one set of peers: {options} against {self.options}."
                )
            return
        if threading.current_thread() is not threading.main_thread():
            raise ModelError(f"{self.here}: hivemind's processes must be started in the main thread of a process.")
        self.options = options
        with forking():
            import hivemind  # within forking(), so that its locks are those of fork
        if not options.verbose and "HIVEMIND_LOGLEVEL" not in os.environ:
            logging.getLogger("hivemind").setLevel(logging.CRITICAL)
        self._folder = SocketFolder()
        place = self._world.placement
        if place.rank == 0:
            self.dht = self._started(hivemind, options.initial_peers)
        first: list[str] = broadcast([str(each) for each in self.dht.get_visible_maddrs()] if self.dht else [])
        if place.rank > 0:
            self.dht = self._started(hivemind, options.initial_peers if options.client_mode else first)
        assert self.dht is not None
        self.ids = gather_object(str(self.dht.peer_id))
        self._see_each_other()
        self._tell_others(first)

    def _started(self, hivemind: Any, initial_peers: Any) -> Any:
        """Return a running DHT, after a few attempts."""
        options, errors = self.options, list[str]()
        inside = self._world.placement.nnodes == 1 and not options.initial_peers
        host = {"auto": "127.0.0.1" if inside else "0.0.0.0", "loopback": "127.0.0.1"}.get(options.host, options.host)
        how = _LOOPBACK if host == "127.0.0.1" else {}
        for _ in range(_TRIES):
            with forking():
                dht = hivemind.DHT(
                    initial_peers=list(initial_peers),
                    start=False,
                    client_mode=options.client_mode,
                    host_maddrs=[f"/ip4/{host}/tcp/0"],
                    **how,
                )
                try:
                    dht.run_in_background(timeout=_START_SECONDS)
                    return dht
                except BaseException as error:
                    dht.terminate()
                    dht.join(_START_SECONDS)
                    if not isinstance(error, Exception):
                        raise
                    errors.append(f"{type(error).__name__}: {first_line(error)}")
        known = f" with initial_peers={list(initial_peers)}" if initial_peers else ""
        raise LaunchError(
            f"{self.here}: hivemind did not start{known}, {_TRIES} times: {'; '.join(dict.fromkeys(errors))}. "
            "Are the peers running, and can this node reach them? A run prints its addresses at each start, "
            "and they change."
        )

    def _see_each_other(self) -> None:
        """Wait until this rank's DHT has all ranks.

        Raises:
            LaunchError: a rank does not see another; raised on all ranks.
        """
        place, options = self._world.placement, self.options
        if place.world_size == 1:
            return
        from hivemind.utils import get_dht_time

        key = f"{options.run_id}_ranks_{broadcast(secrets.token_hex(8))}"
        deadline, seen = time.monotonic() + options.peer_seconds, set[int]()
        stored = False
        while len(seen) < place.world_size and time.monotonic() < deadline:
            expires = get_dht_time() + 2 * options.peer_seconds + 60
            if not stored:
                stored = bool(self._within(self.dht.store(key, True, expires, subkey=place.rank, return_future=True)))
            seen = {rank for rank, _ in self._entries(key)}
            time.sleep(0 if len(seen) == place.world_size else _LOOK_SECONDS)
        everyone = gather_object(sorted(seen))
        blind = {rank: set(range(place.world_size)) - set(seen) for rank, seen in enumerate(everyone)}
        if any(blind.values()):
            told = "; ".join(
                f"rank {rank} does not see {named_ranks(sorted(who))}" for rank, who in blind.items() if who
            )
            raise LaunchError(
                f"{self.here}: after peer_seconds={options.peer_seconds:g} {told} among hivemind's peers. They "
                "would train apart. Does a firewall block ports between them? Otherwise raise peer_seconds."
            )

    def _tell_others(self, first: list[str]) -> None:
        options, size = self.options, self._world.placement.world_size
        if self._world.placement.rank > 0:
            return
        inside = all("/127.0.0.1/" in each for each in first)
        where = " (on this machine; host='0.0.0.0' lets others join)" if inside else ""
        say(
            f"hivemind: {size} peer{'s' if size > 1 else ''} of run_id={options.run_id!r}. Another run joins{where} "
            f"with: HivemindStrategy(initial_peers={first}, run_id={options.run_id!r}, "
            f"target_batch_size={options.target(size)}, batch_size=…)"
        )

    # Other runs

    def meet_members(self, key: str, how: list[Any]) -> None:
        """Publish this run's settings for peers of other runs, and check that theirs are the same.

        Args:
            key: a key for what is trained.
            how: the settings that must be the same.

        Raises:
            LaunchError: this run should join others, and finds no peer that trains this.
            ModelError: they have other settings.
        """
        from hivemind.utils import get_dht_time

        self._member_key = f"{key}_members"
        deadline = time.monotonic() + self.options.peer_seconds
        joins, strangers = bool(self.options.initial_peers), list[Any]()
        while not strangers:
            strangers = [value for peer, value in self._entries(self._member_key) if peer not in self.ids]
            if not joins or strangers or self._entries(f"{key}_progress"):
                break
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{self.here}: reached peers at initial_peers={list(self.options.initial_peers)}, but "
                    f"found none that trains run_id={self.options.run_id!r} within "
                    f"peer_seconds={self.options.peer_seconds:g}. Give the run_id that the other run prints."
                )
            time.sleep(_LOOK_SECONDS)
        for other in strangers:
            if list(other) != how:
                raise ModelError(
                    f"{self.here}: a peer of another run trains run_id={self.options.run_id!r} with "
                    f"{_in_words(other)}, and this run with {_in_words(how)}. Make them alike, or give another run_id."
                )
        expires = get_dht_time() + _MEMBER_SECONDS
        self._within(self.dht.store(self._member_key, how, expires, subkey=str(self.dht.peer_id), return_future=True))

    def _entries(self, key: str) -> list[tuple[Any, Any]]:
        """Return the DHT's entries under a key, with their sub-keys."""
        found = self._within(self.dht.get(key, latest=True, return_future=True))
        values = getattr(found, "value", None)
        items = values.items() if isinstance(values, dict) else ()
        return [(name, item.value) for name, item in items if item.value is not None]

    def _within(self, future: Any) -> Any:
        """Return the result of one of hivemind's futures within `peer_seconds`, or ``None`` if it fails."""
        with contextlib.suppress(Exception):  # it is tried again, or the missing entry is reported
            return future.result(self.options.peer_seconds)
        return None

    def close(self) -> None:
        dht, self.dht = self.dht, None
        try:
            if dht is not None:
                with _quietly():
                    self._say_goodbye(dht)
                    dht.shutdown()
                if dht.is_alive():
                    dht.kill()
                dht.join(_START_SECONDS)
        finally:
            folder, self._folder = self._folder, None
            if folder is not None:
                folder.remove()

    def _say_goodbye(self, dht: Any) -> None:
        from hivemind.utils import get_dht_time

        if self._member_key and dht.is_alive():
            expires, own = get_dht_time() + _MEMBER_SECONDS, str(self.ids[self._world.placement.rank])
            dht.store(self._member_key, None, expires, subkey=own, return_future=True).result(_GOODBYE_SECONDS)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress errors while hivemind ends; what is left of it is killed."""
    with contextlib.suppress(Exception):
        yield


def _in_words(how: list[Any]) -> str:
    target, digest = how
    return f"target_batch_size={target} and a model of shapes {digest}"
