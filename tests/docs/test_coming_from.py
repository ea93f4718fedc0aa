"""The pages for those who come from another package: the programs before and after train the same weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from distwrap import former_names
from tests.docs import coming_from, test_names
from tests.docs.coming_from import NAMES, PAGES, PROGRAMS, assert_page_holds, commands_of, one_process, rows

# The package of each program before, where it can be installed beside the tests; torch's own need none.
PACKAGES = {
    "dataparallel": "torch",
    "ddp": "torch",
    "mp_spawn": "torch",
    "accelerate": "accelerate",
    "fabric": "lightning",
    "lightning": "lightning",
    "ignite": "ignite",
    "torchrunx": "torchrunx",
}
# Those whose program before runs in tests/engines, or nowhere: how the commands begin that run without the package.
ELSEWHERE = {
    "bagua": "python bagua_after.py",
    "horovod": ("python ", "distwrap "),
    "deepspeed": "DISTWRAP_STRATEGY=zero2",
    "ray_train": "DISTWRAP_LAUNCHER=fork",
}


def test_each_page_is_run() -> None:
    """No page is forgotten here or in the index, and each shows its two programs and runs them."""
    assert sorted([*PACKAGES, *ELSEWHERE]) == NAMES == sorted(rows())
    for name in NAMES:
        text, commands = (PAGES / f"{name}.md").read_text(), commands_of(name)
        for program in (f"{name}_before.py", f"{name}_after.py"):
            assert f"programs/{program}" in text
            assert any(program in command for command in commands)
    assert {path.name for path in PROGRAMS.iterdir() if path.suffix == ".py"} == {
        f"{name}_{which}.py" for name in NAMES for which in ("before", "after")
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_index_counts_the_lines(name: str) -> None:
    """The table says how many lines each program has, empty ones aside."""
    counted = [
        str(sum(bool(line.strip()) for line in (PROGRAMS / f"{name}_{which}.py").read_text().splitlines()))
        for which in ("before", "after")
    ]
    assert rows()[name][3:5] == counted
    assert rows()[name][5] in ("to the bit", "to 1e-6")


# What the pages call beside public functions: methods, torch's own, and what comes from distwrap's modules.
CALLED = {"DataLoader", "DeepSpeedStrategy", "Net", "ddp", "deepspeed", "encode", "fsdp", "gathered_weights", "horovod"}
CALLED |= {"no_grad", "options", "pause", "range", "ray", "save_engine", "step", "train", "train_func", "training"}


@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_this_package_are_there(name: str) -> None:
    """Each function in the right column of a page's tables is public, and takes the arguments that it is given."""
    assert {*test_names.problems((PAGES / f"{name}.md").read_text())} <= CALLED


def test_lightnings_names_become_what_the_page_says() -> None:
    """The table of strategies agrees with the code."""
    text = (PAGES / "lightning.md").read_text()
    table = text[text.index("## Names of strategies") :].split("\n\n")[2]
    checked = 0
    for row in table.splitlines()[2:]:
        theirs, ours = ([part.strip('`"') for part in cell.split("`, ")] for cell in row.strip("| ").split(" | ")[:2])
        for name in theirs:
            launcher = former_names.LAUNCHER_OF_STRATEGY.get(name)
            became = former_names.BECAME.get(name, "ddp" if launcher and name.startswith("ddp_") else name)
            assert became in ours, name
            checked += 1
    assert checked > 20


@pytest.mark.slow("runs three programs or four, of two ranks each")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PACKAGES)
def test_before_and_after_train_the_same_weights(name: str, tmp_path: Path) -> None:
    """All commands of the page run as they stand, the converted program too, and all end with the same weights."""
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    assert_page_holds(name, tmp_path, {"ACCELERATE_USE_CPU": "true"} if name == "accelerate" else None)


@pytest.mark.slow("runs programs of two ranks")
@pytest.mark.parametrize("name", ELSEWHERE)
def test_after_trains_the_weights_of_one_process(name: str, tmp_path: Path) -> None:
    """Where the package is not, the program after still runs, and has the weights of one process in plain torch."""
    commands = [each for each in commands_of(name) if each.startswith(ELSEWHERE[name])]
    assert commands
    assert_page_holds(name, tmp_path, commands=commands)


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_other_weights_would_be_seen() -> None:
    """The comparison tells a training in another order."""
    with pytest.raises(AssertionError, match=r"a\.pt"):
        coming_from.assert_same({"a.pt": one_process(shuffle=True)}, one_process(shuffle=False), 1e-6)
