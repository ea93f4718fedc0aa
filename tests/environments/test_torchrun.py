from __future__ import annotations

from itertools import combinations

import pytest

from distwrap.environments import Placement, detect, torchrun
from distwrap.errors import PlacementError

COMPLETE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
CLAIMS = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
HALF_SET = [
    kept
    for size in range(1, len(torchrun.REQUIRED))
    for kept in combinations(torchrun.REQUIRED, size)
    if CLAIMS.intersection(kept)
]


def test_torchruns_variables_are_read() -> None:
    """A complete environment is a placement, each value from its own variable."""
    assert torchrun.detect(COMPLETE) == Placement(5, 8, 1, 4, 1, 2, "head", 29500, "torchrun")


@pytest.mark.parametrize("env", [{}, {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}, {"LOCAL_WORLD_SIZE": "2"}])
def test_an_environment_that_claims_no_rank_is_not_torchruns(env: dict[str, str]) -> None:
    """Without a rank, a world size or a local rank nobody has launched us: an address may be of a shell profile."""
    assert isinstance(torchrun.detect(env), str)
    assert detect(env) == Placement()


@pytest.mark.parametrize("kept", HALF_SET, ids="+".join)
def test_a_half_set_environment_is_refused(kept: tuple[str, ...]) -> None:
    """Whichever of the required variables are missing, the error lists what is there, what is not, and a way out."""
    with pytest.raises(PlacementError) as caught:
        detect({name: COMPLETE[name] for name in kept})
    found = ", ".join(f"{name}={COMPLETE[name]}" for name in kept)
    missing = ", ".join(name for name in torchrun.REQUIRED if name not in kept)
    claims = ", ".join(name for name in kept if name in CLAIMS)
    assert f"it has {found}, but not {missing}." in str(caught.value)
    assert str(caught.value).endswith(f"or unset {claims}.")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["", "two", "1.5"])
def test_a_variable_that_is_no_number_is_refused(name: str, text: str) -> None:
    """A value that is not a whole number is refused by its variable's name."""
    with pytest.raises(PlacementError, match=f"^{name}={text!r} is not a whole number"):
        torchrun.detect({**COMPLETE, name: text})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "8"}, "rank 8 of 8: it must be 0 to 7"),
        ({"RANK": "-1"}, "rank -1 of 8"),
        ({"LOCAL_RANK": "4"}, "local rank 4 of 4: it must be 0 to 3"),
        ({"GROUP_RANK": "2"}, "node rank 2 of 2"),
        ({"WORLD_SIZE": "0"}, "rank 5 of 0"),
        ({"LOCAL_WORLD_SIZE": "16"}, "16 processes on this node, but 8 in all"),
    ],
)
def test_a_contradiction_is_refused(changed: dict[str, str], message: str) -> None:
    """Variables that cannot all be true are refused, with both numbers."""
    with pytest.raises(PlacementError, match=message):
        torchrun.detect({**COMPLETE, **changed})


def by_hand(rank: int, world_size: int, local_rank: int, **more: str) -> dict[str, str]:
    """The five variables that people export themselves, and more."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": "head",
        "MASTER_PORT": "29500",
        **more,
    }


def test_the_five_variables_mean_one_machine() -> None:
    """Where only the required variables are set, all ranks are on this machine."""
    place = torchrun.detect(by_hand(1, 2, 1))
    assert place == Placement(1, 2, 1, 2, 0, 1, "head", 29500, "torchrun")


@pytest.mark.parametrize(("rank", "node"), [(0, 0), (3, 0), (4, 1), (9, 2)])
def test_the_machine_follows_from_the_rank(rank: int, node: int) -> None:
    """Without GROUP_RANK the machines are counted off by their ranks, the last one perhaps with fewer."""
    place = torchrun.detect(by_hand(rank, 10, rank % 4, LOCAL_WORLD_SIZE="4"))
    assert isinstance(place, Placement)
    assert (place.node_rank, place.nnodes) == (node, 3)


def test_several_machines_without_their_size_are_refused() -> None:
    """A rank that is not its local rank is on another machine, and how many ranks are there is not guessed."""
    with pytest.raises(PlacementError, match="several nodes"):
        torchrun.detect(by_hand(4, 8, 0))
