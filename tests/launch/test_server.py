"""The fork server: warm, private, and up to date."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

import distwrap as dw
from distwrap import distributed
from distwrap.launch import forkserver
from tests.interpreters import run_python
from tests.slow import slow

PROGRAM = "a program"


def test_it_is_reused() -> None:
    """Later launches come from the same server."""
    distributed(nprocs=2, launcher="forkserver")(dw.rank)()
    before = forkserver.warm_server().pid
    distributed(nprocs=2, launcher="forkserver")(dw.rank)()
    assert forkserver.warm_server().pid == before


def test_a_variable_that_is_read_at_start_wants_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed OMP_ variable cannot be taken over by a running server, which is not used then."""
    server = forkserver.warm_server()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert not server.usable()
    monkeypatch.undo()
    assert server.usable()


def test_a_start_that_is_interrupted_leaves_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a Ctrl-C while a rank is started its connection is closed, also where the error is kept."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    server = forkserver.warm_server()
    monkeypatch.setattr(forkserver, "wait", interrupt)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt) as kept:
        forkserver.ServedProcess(0, server)
    assert sorted(os.listdir("/proc/self/fd")) == before, kept


def test_surroundings_are_the_callers_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks see the caller's environment, folder, arguments and import path of the moment of the call."""
    (tmp_path / "brand_new_module.py").write_text("VALUE = 42\n")
    monkeypatch.setenv("BRAND_NEW", "yes")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["prog", "--flag"])

    @distributed(nprocs=2, launcher="forkserver")
    def look() -> tuple[object, ...]:
        import brand_new_module  # type: ignore[import-not-found]

        return os.environ.get("BRAND_NEW"), os.environ.get("HOME"), os.getcwd(), sys.argv, brand_new_module.VALUE

    assert look() == ("yes", None, str(tmp_path), ["prog", "--flag"], 42)


def test_output_goes_where_the_callers_goes_now(capfd: pytest.CaptureFixture[str]) -> None:
    """What ranks print lands on the caller's standard output and error of the moment, in whole lines."""

    @distributed(nprocs=2, launcher="forkserver")
    def speak() -> None:
        print("rank", dw.rank(), "speaks")
        print("rank", dw.rank(), "complains", file=sys.stderr)

    speak()
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["rank 0 speaks", "rank 1 speaks"]
    assert sorted(line for line in err.splitlines() if "complains" in line) == ["rank 0 complains", "rank 1 complains"]


@pytest.mark.parametrize("launcher", ["forkserver", slow("spawn", why="[forkserver], and tests/process/")])
def test_no_main_guard_is_needed(launcher: str, tmp_path: Path) -> None:
    """By value a script needs no main guard, is not imported again, and its classes work on the ranks."""
    (tmp_path / "bare.py").write_text(
        textwrap.dedent(f"""
        import io, pickle, torch, distwrap as dw
        print("top")
        class Config:
            lr = 0.5
        class Mine(Exception): pass
        @dw.distributed(nprocs=2, launcher="{launcher}")
        def main(config):
            pickle.loads(pickle.dumps(Config()))  # by name, on the rank
            net = torch.nn.Linear(1, 1)
            torch.save(config, io.BytesIO())
            if config is None: raise Mine("none")
            return Config(), config.lr
        got, lr = main(Config())
        print("got", type(got) is Config, lr)
        try: main(None)
        except Mine as error: print("caught", error)
        """)
    )
    done = run_python("bare.py", cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["top", "got True 0.5", "caught none"]


SETTINGS = """
import json, sys, warnings
import numpy
import torch, distwrap as dw

def change():
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    warnings.filterwarnings("error", "a word of it")
    numpy.seterr(all="raise")

@dw.distributed(nprocs=2, launcher=sys.argv[1], returns="all")
def main():
    torch.backends.cudnn.deterministic = True
    try:
        warnings.warn("a word of it")
    except UserWarning:
        raised = True
    return [str(torch.ones(1).dtype), torch.ones(1).device.type, torch.get_deterministic_debug_mode(),
            torch.get_float32_matmul_precision(), torch.backends.cudnn.deterministic, raised, numpy.geterr()["over"]]

if __name__ == "__main__":
    change()
    print("got", json.dumps(main()))
"""


@pytest.mark.parametrize(("launcher", "named"), [("forkserver", True), ("spawn", False)])
@pytest.mark.slow(PROGRAM)
def test_settings_are_the_callers(launcher: str, named: bool, tmp_path: Path) -> None:
    """Settings that decide what is computed hold on the ranks, with cloudpickle and without."""
    (tmp_path / "settings.py").write_text((HIDE if named else "") + SETTINGS)
    done = run_python("settings.py", launcher, cwd=tmp_path, timeout=60)
    row = ["torch.float64", "meta", 1, "high", True, True, "raise"]
    assert done.stdout.splitlines() == ["got " + json.dumps([row] * 2)], done.stderr


HIDE = """import importlib.util as u; find = u.find_spec
u.find_spec = lambda name, *a: None if name == 'cloudpickle' else find(name, *a)
"""


@pytest.mark.slow(PROGRAM)
def test_a_module_of_a_package_by_name(tmp_path: Path) -> None:
    """Without cloudpickle ``python -m package.train`` works too, whose imports may be relative."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "config.py").write_text("class Config: lr = 0.5\n")
    (package / "train.py").write_text(
        HIDE + "import distwrap as dw\n"
        "from .config import Config\n"
        "@dw.distributed(nprocs=2, launcher='forkserver')\n"
        "def main():\n"
        "    from . import config\n"
        "    return config.Config(), __package__\n"
        "if __name__ == '__main__':\n"
        "    got, name = main()\n"
        "    print('got', type(got) is Config, name)\n"
    )
    done = run_python("-m", "package.train", cwd=tmp_path, timeout=60)
    assert done.stdout == "got True package\n", done.stderr


@pytest.mark.slow(PROGRAM)
@pytest.mark.parametrize(("launcher", "guard"), [("spawn", True), ("forkserver", False)])
def test_by_name(launcher: str, guard: bool, tmp_path: Path) -> None:
    """Without cloudpickle a guarded script works, and one without a guard is refused with the way out."""
    call = "if __name__ == '__main__': print('got', main(Config()).lr)" if guard else "main(Config())"
    (tmp_path / "named.py").write_text(
        HIDE + "import distwrap as dw\n"
        "class Config: lr = 0.5\n"
        f"@dw.distributed(nprocs=2, launcher='{launcher}')\n"
        "def main(config): return config\n" + call + "\n"
    )
    done = run_python("named.py", cwd=tmp_path, timeout=60)
    if guard:
        assert done.stdout == "got 0.5\n", done.stderr
    else:
        assert done.returncode == 1
        assert "MainGuardError" in done.stderr
        assert "Put the call under `if __name__ == '__main__':`" in done.stderr


def test_two_runs_at_once() -> None:
    """Two launches side by side, from threads of one caller, do not meet."""
    from concurrent.futures import ThreadPoolExecutor

    @distributed(nprocs=2, launcher="forkserver")
    def total(n: int) -> list[int]:
        return list(dw.gather(n + dw.rank()).tolist())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(total, [0, 10, 20, 30])) == [[n, n + 1] for n in (0, 10, 20, 30)]


def test_random_numbers_start_as_the_callers() -> None:
    """Ranks start with the caller's random state, whichever way they are started."""
    import torch

    state = torch.get_rng_state()
    try:
        torch.manual_seed(9)
        draw = distributed(nprocs=2, returns="all")(lambda: torch.rand(1).item())
        drawn = {value for launcher in ("fork", "forkserver", "spawn") for value in draw.options(launcher=launcher)()}
        assert drawn == {torch.rand(1).item()}
    finally:
        torch.set_rng_state(state)
