"""setup_process_group finds who started us, joins, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import distwrap as dw
from distwrap.errors import OptionError
from distwrap.testing import run_ranks
from tests.by_hand import by_hand
from tests.interpreters import run_python
from tests.limits import SOON
from tests.orphans import lives
from tests.slow import nightly

LIMIT = 60.0


def outputs_of(code: str, folder: Path, nprocs: int = 2, started: int | None = None) -> list[str]:
    """Start ranks with torchrun's variables set by hand, without an agent that holds the store; return their output."""
    program = folder / "rank.py"
    program.write_text("import os, torch, torch.distributed as dist, distwrap as dw\n" + code)
    return [output for _, output in by_hand(program, nprocs=nprocs, started=started)]


def all_end_well(code: str, folder: Path) -> None:
    """Two ranks of torchrun's variables come to the end of a program whose last line says so."""
    outputs = outputs_of(code + "print('done')\n", folder)
    assert all(output.rstrip().endswith("done") for output in outputs), outputs


def test_a_single_process_is_left_as_it_is() -> None:
    """Without a launcher's variables nothing happens: no group, rank 0 of 1, before, inside and after."""
    with dw.setup_process_group():
        assert (dw.rank(), dw.world_size(), dw.local_rank(), dw.local_world_size(), dw.node_rank()) == (0, 1, 0, 1, 0)
        assert dw.is_rank_zero()
        assert dw.placement().source == "single"
    dw.teardown_process_group()
    assert dw.device().type in ("cpu", "cuda")


def test_with_torchruns_variables(tmp_path: Path) -> None:
    """Ranks join, a second call is a no-op, rank queries hold before, during and after, and a second group works."""
    outputs = outputs_of(
        "assert dw.rank() == int(os.environ['RANK']) and dw.world_size() == 2\n"
        "for n in range(2):\n"
        "    with dw.setup_process_group(timeout=30) as group:\n"
        "        assert dw.placement().source == 'torchrun'\n"
        "        with dw.setup_process_group(): pass\n"
        "        assert dist.is_initialized()\n"
        "        print('sum', dw.reduce(dw.rank() + n, 'sum'))\n"
        "    assert not dist.is_initialized() and dw.world_size() == 2\n"
        "assert 'GLOO_SOCKET_IFNAME' not in os.environ\n"
        "dw.setup_process_group(); dw.barrier(); dw.teardown_process_group(); print('done')\n",
        tmp_path,
    )
    # torch may warn of a connection to the store of the group before, which rank 0 is just closing on the same port.
    told = [[line for line in output.splitlines() if line.startswith(("sum", "done"))] for output in outputs]
    assert told == [["sum 1", "sum 3", "done"]] * 2, outputs


def _again() -> list[str]:
    said = []
    backend: str = dist.get_backend()
    for options in ({}, {"backend": backend}, {"timeout": LIMIT}, {"backend": "mpi"}, {"timeout": 7}):
        try:
            dw.setup_process_group(**options)
        except OptionError as error:
            said.append(str(error))
    return said


def test_a_second_call_with_other_options() -> None:
    """What the run has may be said again; what it has not is refused, and not ignored."""
    for rank, said in enumerate(run_ranks(_again, 2, timeout=LIMIT)):
        beginning = f"rank {rank}: setup_process_group() got"
        assert len(said) == 2
        assert said[0].startswith(f"{beginning} backend='mpi' inside a run that has backend='gloo'")
        assert said[1].startswith(f"{beginning} timeout=7 inside a run that has timeout={LIMIT}")


def _seen() -> tuple[int, list[str | None]]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return pytest.importorskip("accelerate").Accelerator(cpu=True).num_processes, [*map(os.environ.get, names)]


@pytest.mark.filterwarnings("ignore:OMP_NUM_THREADS")  # of Accelerate, about this machine
@pytest.mark.processes("the variables are those of a process")
def test_other_libraries_see_the_world() -> None:
    """Each rank has torchrun's variables as long as its group is there, and Accelerate reads them."""
    meeting = ["127.0.0.1", "29500"]
    assert run_ranks(_seen, 2) == [(2, ["0", "0", "2", "2", *meeting]), (2, ["1", "1", "2", "2", *meeting])]
    assert "MASTER_ADDR" not in os.environ


@pytest.mark.slow("two programs")
def test_the_store_of_the_group_before(tmp_path: Path) -> None:
    """A rank that is early for the next group waits where rank 0 still closes the store of the one before."""
    all_end_well(
        "import time\n"
        "from distwrap.group import setup\n"
        "say_goodbye = setup.say_goodbye\n"
        "if dw.rank() == 0: setup.say_goodbye = lambda *place: (say_goodbye(*place), time.sleep(0.5))\n"
        "for n in range(2):\n"
        "    with dw.setup_process_group(timeout=20): dw.barrier()\n",
        tmp_path,
    )


@pytest.mark.slow("two programs")
def test_a_model_of_the_group_before(tmp_path: Path) -> None:
    """What torch has made around a model holds the store: the next group found the port taken by this very process."""
    all_end_well(
        "import torch\n"
        "for n in range(3):\n"
        "    with dw.setup_process_group(timeout=20): model = dw.wrap_model(torch.nn.Linear(1, 1))\n",
        tmp_path,
    )


@pytest.mark.slow("two programs")
def test_a_group_of_the_users_is_left_alone(tmp_path: Path) -> None:
    """Where the user has made a group, helpers and decorated functions use it, and it outlives them."""
    outputs = outputs_of(
        "dist.init_process_group('gloo')\n"
        "with dw.setup_process_group(): print(dw.placement().source, dw.reduce(dw.rank(), 'sum'))\n"
        "print(dw.distributed(nprocs=5)(lambda: dw.gather(dw.rank()).tolist())())\n"
        "assert dist.is_initialized()\n"
        "dist.destroy_process_group()\n",
        tmp_path,
    )
    assert outputs == ["torch.distributed 1\n[0, 1]\n"] * 2


@pytest.mark.slow("two programs")
def test_models_in_a_group_of_the_users(tmp_path: Path) -> None:
    """A model of a run with comm= is not trained after it, as nothing exchanges its weights; statistics are told of."""
    outputs = outputs_of(
        "os.environ['DISTWRAP_QUIET'] = '0'\n"
        "dist.init_process_group('gloo')\n"
        "@dw.distributed(comm='local_sgd(sync_every=2)')\n"
        "def main(): return dw.wrap_model(torch.nn.Linear(2, 1))\n"
        "model = main()\n"
        "with torch.no_grad(): model(torch.ones(1, 2))\n"
        "try: model(torch.ones(1, 2))\n"
        "except dw.errors.ModelError as error: print('said', error)\n"
        "model = dw.wrap_model(torch.nn.Sequential(dw.unwrap_model(model), torch.nn.BatchNorm1d(1)))\n"
        "model(torch.randn(4, 2)).sum().backward()\n"
        "model.eval()\n"
        "dist.destroy_process_group()\n",
        tmp_path,
    )
    assert all("said this model was wrapped under comm= in a run that has ended" in each for each in outputs), outputs
    assert [each.count("eval() sees this rank's own running statistics") for each in outputs] == [1, 0], outputs


@pytest.mark.slow("two programs")
def test_missing_ranks_are_named(tmp_path: Path) -> None:
    """When a rank does not come, those that wait say which one, in time."""
    start = time.monotonic()
    outputs = outputs_of("dw.setup_process_group(timeout=4)\n", tmp_path, nprocs=3, started=2)
    assert time.monotonic() - start < SOON
    assert all("ArrivalError" in output for output in outputs), outputs
    assert all("2 of 3 ranks are here; missing: rank 2" in output for output in outputs), outputs


@pytest.mark.slow("a program")
def test_a_helper_before_the_group_is_refused(tmp_path: Path) -> None:
    """A collective before setup_process_group says what to call."""
    (tmp_path / "early.py").write_text("import distwrap as dw\ndw.barrier()\n")
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = run_python("early.py", cwd=tmp_path, env={**os.environ, **env}, timeout=LIMIT)
    assert "barrier needs the process group, and rank 0 of 2 (started by torchrun) has none yet" in done.stderr
    assert "call setup_process_group() first" in done.stderr


def test_our_ranks_listen_on_loopback_only() -> None:
    """The store and the ranks of one machine listen on loopback alone."""

    def listening(caller: int) -> set[str]:
        dw.barrier()
        found = addresses_of(sockets(os.getpid()) | sockets(caller))
        dw.barrier()
        return found

    for found in run_ranks(listening, 2, os.getpid()):
        assert found == {"0100007F"}


def sockets(pid: int) -> set[str]:
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(fd))
    return found


def addresses_of(targets: set[str]) -> set[str]:
    """The local addresses, in hexadecimal, on which these sockets listen."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in targets}


def test_who_leaves_waits_for_who_still_connects() -> None:
    """A rank that has made its last group, and is done, could cut the connections that another is about to make."""

    def connections() -> list[bool]:
        pids = dw.gather_object(os.getpid())
        lived: list[bool] = []
        if dw.rank() == 0:
            plain = dist.new_group

            def slow_group(*args: Any, **kwargs: Any) -> Any:
                made = plain(*args, **kwargs)
                time.sleep(1.0)
                lived.append(lives(pids[1]))
                return made

            dist.new_group = slow_group
        dw.wrap_model(nn.Linear(1, 1), comm="local_sgd")
        return lived

    lived = run_ranks(connections, 2)[0]
    assert lived
    assert all(lived)


@pytest.mark.parametrize(
    "launcher", ["script", *(nightly(name, row="products", why="[script]") for name in ("fork", "forkserver"))]
)
@pytest.mark.slow("a program")
def test_plain_torch_works_in_a_rank(launcher: str, tmp_path: Path) -> None:
    """Code that uses torch.distributed itself works in a decorated function."""
    (tmp_path / "plain.py").write_text(
        "import sys, torch, torch.distributed as dist, distwrap as dw\n"
        "@dw.distributed(nprocs=2, launcher=sys.argv[1])\n"
        "def main():\n"
        "    x = torch.ones(1) * dist.get_rank(); dist.all_reduce(x)\n"
        "    sub = dist.new_group([0, 1]); dist.all_reduce(x, group=sub)\n"
        "    return x.item()\n"
        "if __name__ == '__main__': print('got', main())\n"
    )
    done = run_python("plain.py", launcher, cwd=tmp_path, timeout=LIMIT)
    assert done.stdout == "got 2.0\n", done.stderr
    assert done.stderr == ""
