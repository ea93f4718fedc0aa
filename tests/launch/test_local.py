import pytest

import distwrap as dw
from distwrap.testing import run_ranks


@pytest.mark.parametrize("launcher", ["fork", "forkserver", "spawn"])
def test_x(launcher):
    def f():
        return dw.rank()

    assert dw.distributed(nprocs=2, launcher=launcher, returns="all")(f)() == [0, 1]


def test_y():
    assert run_ranks(lambda x: x + dw.rank(), 2, 3) == [3, 4]
