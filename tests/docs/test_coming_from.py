"""The pages for those who come from another package: the programs before and after train the same weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs import coming_from
from tests.docs.coming_from import NAMES, PAGES, assert_page_holds, commands_of, files_of, one_process
from tests.docs.due import cases
from tests.docs.pages import ROOT
from tests.nightly import changed_since_green

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
    "bagua": "DISTWRAP_STRATEGY='bagua",
    "horovod": ("python ",),
    "deepspeed": "DISTWRAP_STRATEGY=zero1",
    "ray_train": "DISTWRAP_LAUNCHER=fork",
}


def due() -> set[str]:
    """Return the pages of which a file has changed; that of DDP, with the program after of most, is one always."""
    changed = changed_since_green("pages")
    files = {name: {PAGES / f"{name}.md", *files_of(name)} for name in NAMES}
    return {"ddp"} | {
        name for name in NAMES if changed is None or changed & {str(path.relative_to(ROOT)) for path in files[name]}
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let the pages that are due run in `make test-all`, and all of them in `make nightly`."""
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", cases(metafunc.config, "pages", NAMES, due()))


def test_no_page_is_forgotten() -> None:
    """Each page is one whose programs before can run here, or one whose cannot."""
    assert sorted([*PACKAGES, *ELSEWHERE]) == NAMES


@pytest.mark.timeout(600)
def test_before_and_after_train_the_same_weights(page: str, tmp_path: Path) -> None:
    """All commands of the page run as they stand, the converter's too, and all end with the weights of one process.

    Where the program before cannot run, those do that can.
    """
    if page in ELSEWHERE:
        commands = [each for each in commands_of(page) if each.startswith(ELSEWHERE[page])]
        assert commands
        assert_page_holds(page, tmp_path, commands=commands)
        return
    if find_spec(PACKAGES[page]) is None:
        pytest.skip(f"{PACKAGES[page]} is not installed")
    assert_page_holds(page, tmp_path, {"ACCELERATE_USE_CPU": "true"} if page == "accelerate" else None)


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_other_weights_would_be_seen() -> None:
    """The comparison tells a training in another order."""
    with pytest.raises(AssertionError, match=r"a\.pt"):
        coming_from.assert_same({"a.pt": one_process(shuffle=True)}, one_process(shuffle=False), 1e-6)
