"""What torch's agents read of each other."""

from __future__ import annotations

import os
import pickle
from base64 import b64encode
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from distwrap.launch.agents import CheckedBackend


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_a_state_of_torchs_is_read() -> None:
    """torch's own state passes, with all that it may hold."""
    backend = CheckedBackend(C10dRendezvousBackend(dist.HashStore(), "mine"))
    assert backend.get_state() is None
    node = dynamic_rendezvous._NodeDesc("host", 1, 2)
    state = dynamic_rendezvous._RendezvousState()
    state.deadline, state.participants = datetime.now(timezone.utc), {node: 0}
    state.wait_list, state.last_heartbeats = {node}, {node: datetime.now(timezone.utc)}
    data = pickle.dumps(state)
    assert backend.set_state(data)[::2] == (data, True)  # type: ignore[index]
    assert backend.get_state()[0] == data  # type: ignore[index]


def test_a_strangers_state_is_not_read(tmp_path: Path) -> None:
    """Whoever connects to the agents' store can stop them, and call nothing."""
    store, harmful = dist.HashStore(), tmp_path / "was here"
    backend = CheckedBackend(C10dRendezvousBackend(store, "mine"))
    node = dynamic_rendezvous._NodeDesc
    change = f"c{node.__module__}\n{node.__name__}\n".encode() + b"(N}X\x06\0\0\0poisonK\x07stb."
    for data in (pickle.dumps({"round": Harmful(str(harmful))}), change, b"junk"):
        store.set("torch.rendezvous.mine", b64encode(data).decode())
        for ask in (backend.get_state, lambda: backend.set_state(b"", b"other")):
            with pytest.raises(RendezvousStateError, match="is not their state, and is not read"):
                ask()
    assert not harmful.exists()
    assert not hasattr(node, "poison")


def test_a_state_is_no_larger_than_it_is() -> None:
    """Python makes room for as many objects as a pickle says: nine bytes took a gigabyte of each agent."""
    store = dist.HashStore()
    store.set("torch.rendezvous.mine", b64encode(b"\x80\x02Nr\0\0\0\x04.").decode())
    with pytest.raises(RendezvousStateError, match="it has fewer objects than it announces"):
        CheckedBackend(C10dRendezvousBackend(store, "mine")).get_state()
