"""The end of a run says nothing: no warning of torch's, on no path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forked_commands import forked_commands
from tests.interpreters import run_python
from tests.slow import nightly

LIMIT = 60.0

PROGRAM = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader
import distwrap as dw

def main():
    model = dw.wrap_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = dw.shard_loader(DataLoader(torch.ones(8, 1), batch_size=2, num_workers=1, persistent_workers=True))
    for batch in dw.lockstep(loader):
        model(batch).sum().backward()
        optimizer.step()
    dw.save({"model": model}, "last.pt")
    return model

if __name__ == "__main__":
    launcher = sys.argv[1]
    if launcher == "by hand":
        with dw.setup_process_group():
            kept = main()
    else:
        kept = dw.distributed(nprocs=2, launcher=launcher)(main)()
    if launcher == "auto":
        dw.setup_process_group()
        other = main()  # a script that forgets the teardown, and holds the model to its end
        dw.barrier()
"""


OTHERS = ["fork", "forkserver", "script", "torchrun"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize(
    "how",
    [
        *OTHERS,
        nightly("spawn", row="products", why="[forkserver]"),
        nightly("torchrun by hand", row="products", why="[torchrun]"),
    ],
)
@pytest.mark.slow("a program")
def test_nothing_is_said(how: str, tmp_path: Path) -> None:
    """A run that ends well leaves standard error empty, under every launcher, with warnings on."""
    warnings = ["-W", "always", "-W", "ignore:`torch.jit:DeprecationWarning"]
    launcher = {"torchrun": "auto", "torchrun by hand": "by hand"}.get(how, how)
    _says_nothing(tmp_path, PROGRAM, *warnings, *(TORCHRUN if how.startswith("torchrun") else []), arguments=[launcher])


FORGETS = """
import distwrap as dw
from distwrap.supervision import channel

channel.TICK_SECONDS = 1e-6  # so that its thread is in the store's native code nearly always
dw.setup_process_group()
dw.barrier()
"""


@pytest.mark.slow("a program under torchrun")
def test_who_forgets_the_teardown_ends_well(tmp_path: Path) -> None:
    """The interpreter's end does not find the side channel's thread in native code, which would abort the rank."""
    _says_nothing(tmp_path, FORGETS, *TORCHRUN)


KEEPS = """
import gc
import distwrap as dw
from distwrap.supervision.notifier import Notifier
from distwrap.supervision.channel import Channel

gc.collect()
gc.disable()
for _ in range(3):
    with dw.setup_process_group():
        dw.barrier()
    kept = [type(thing).__name__ for thing in gc.get_objects() if type(thing) in (Notifier, Channel)]
    assert not kept, kept
"""


@pytest.mark.slow("a program under torchrun")
def test_nothing_keeps_the_store(tmp_path: Path) -> None:
    """It goes with the group, not when the collector comes: a second set-up at the same port was refused."""
    _says_nothing(tmp_path, KEEPS, *TORCHRUN)


def _says_nothing(folder: Path, text: str, *options: str, arguments: Sequence[str] = ()) -> None:
    """Run a program with these options of the interpreter; it ends well, and standard error stays empty."""
    program = folder / "program.py"
    program.write_text(text)
    done = run_python(
        *options,
        program,
        *arguments,
        cwd=folder,
        env={**os.environ, **forked_commands(), "DISTWRAP_QUIET": "1", "OMP_NUM_THREADS": "1"},
        timeout=LIMIT,
    )
    assert (done.returncode, done.stderr) == (0, "")
