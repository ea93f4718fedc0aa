"""One rank reads a stream and sends the others their batches: each batch of one process once, and nobody waits."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import distwrap as dw
from distwrap import distributed, lockstep, rank, shard_loader, world_size
from distwrap.data.dispatch import DispatchGroup
from distwrap.errors import LoaderError
from distwrap.testing import run_ranks
from tests.data.ranks import standing_on
from tests.data.streams import Resumable
from tests.plans import TP
from tests.slow import few

MODES = ("auto", "drop", "pad", "exact")


class Stream(IterableDataset[Any]):
    """Samples of several types, read by one process alone."""

    def __init__(self, n: int, fails_at: int = -1, error: type[Exception] = ValueError) -> None:
        self.n, self.fails_at, self.error, self.readers = n, fails_at, error, set()  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[Any]:
        self.readers.add(rank())
        info = get_worker_info()
        for number in range(0 if info is None else info.id, self.n, 1 if info is None else info.num_workers):
            if number == self.fails_at:
                raise self.error("the queue is gone")
            yield {"x": torch.full((2, 3), number), "half": torch.tensor(number).bfloat16(), "text": f"{number}"}


class Numbers(IterableDataset[int]):
    """Numbers, which know their length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


def dispatched(dataset: Any, mode: str = "auto", **options: Any) -> Any:
    return shard_loader(DataLoader(dataset, **{"batch_size": 2, **options}), split="dispatch", mode=mode)  # type: ignore[arg-type]


def expected(batches: list[Any], mode: str, ranks: int) -> list[list[Any]]:
    """What each rank is to get of the batches of one process."""
    whole = len(batches) // ranks * ranks
    last = batches[whole:]
    if mode == "pad" and last:
        batches = batches[:whole] + (last * ranks)[:ranks]
    elif mode != "exact":
        batches = batches[:whole]
    return [batches[number::ranks] for number in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_gets_its_turn_of_what_one_process_reads(ranks: int) -> None:
    """For any length of the stream, any number of workers, and each rule for the end; in every epoch."""

    def on_rank() -> dict[Any, tuple[list[Any], int]]:
        found = {}
        for n in (0, 1, 7, 10, 12):
            for mode in MODES:
                loader = dispatched(Numbers(n), mode)
                found[n, mode] = [batch.tolist() for batch in loader], len(loader)
                assert [batch.tolist() for batch in loader] == found[n, mode][0], "another epoch"
        loader = dispatched(Numbers(12), num_workers=1)
        found["a worker"] = [batch.tolist() for batch in loader], len(loader)
        return found

    everyones = run_ranks(on_rank, ranks, timeout=60)
    for n in (0, 1, 7, 10, 12):
        plain = [batch.tolist() for batch in DataLoader(Numbers(n), batch_size=2)]
        for mode in MODES:
            shares = expected(plain, "exact" if ranks == 1 else mode, ranks)
            assert [found[n, mode] for found in everyones] == [(share, len(share)) for share in shares], (n, mode)
    assert [found["a worker"] for found in everyones] == [found[12, "auto"] for found in everyones]


def test_only_rank_zero_reads() -> None:
    """The others get tensors of any type, texts and dicts as they are, in memory of their own."""

    def on_rank() -> tuple[set[int], list[Any]]:
        stream = Stream(5)
        batches = list(dispatched(stream, "exact", batch_size=1))
        for batch in batches:
            assert batch["x"].shape == (1, 2, 3)
            assert batch["half"].dtype == torch.bfloat16
            batch["x"] += 1
        return stream.readers, [(int(batch["x"][0, 0, 0]), float(batch["half"]), batch["text"]) for batch in batches]

    first, second = run_ranks(on_rank, 2)
    assert first == ({0}, [(1, 0.0, ["0"]), (3, 2.0, ["2"]), (5, 4.0, ["4"])])
    assert second == (set(), [(2, 1.0, ["1"]), (4, 3.0, ["3"])])


class Own(Exception):
    """An error that the other ranks cannot make."""

    def __reduce__(self) -> Any:
        raise TypeError("no")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.slow("waits for a limit to pass")
def test_the_readers_error_is_raised_on_every_rank(workers: int) -> None:
    """At the start and in the midst, in its own type where that can be sent; the ranks go on together after it."""

    def on_rank() -> list[int]:
        steps = []
        for fails_at in (0, 5):
            taken: list[Any] = []
            with pytest.raises((ValueError, RuntimeError), match="the queue is gone"):
                taken.extend(dispatched(Stream(20, fails_at), num_workers=workers))
            steps.append(len(taken))
            gc.collect()  # or the next worker is born with the failed loader, and tries to end another's worker
        with pytest.raises((Own, LoaderError), match="the queue is gone") as caught:
            list(dispatched(Stream(20, 0, Own)))
        assert isinstance(caught.value, Own if rank() == 0 else LoaderError)
        steps.append(dw.reduce(1, "sum"))
        return steps

    assert run_ranks(on_rank, 2, timeout=60) == [[0, 1, 2]] * 2


@pytest.mark.slow("waits for a limit to pass")
def test_the_reader_is_named_for_its_error() -> None:
    """Rank 0 is the one that has failed, though the others raise the same error, perhaps before it."""

    def on_rank() -> None:
        if rank() == 0:
            send = DispatchGroup.send

            def slowly(group: DispatchGroup, to: int, turn: Any, message: torch.Tensor | None = None) -> None:
                send(group, to, turn, message)
                if to == 3:
                    time.sleep(1.0)  # in which the others fail

            DispatchGroup.send = slowly  # type: ignore[method-assign]
        list(dispatched(Stream(20, 0)))

    with pytest.raises((ValueError, RuntimeError), match="the queue is gone") as refusal:
        run_ranks(on_rank, 4, timeout=60)
    assert refusal.value.rank == 0  # type: ignore[union-attr]


def test_what_cannot_be_sent_is_an_error_on_every_rank() -> None:
    """A batch that cannot be pickled leaves nobody waiting."""

    def on_rank() -> int:
        loader = dispatched(Numbers(8), collate_fn=lambda items: (lambda: items, open(os.devnull)))  # noqa: SIM115
        with pytest.raises(Exception, match="cannot be sent"):
            list(loader)
        return dw.reduce(1, "sum")

    assert run_ranks(on_rank, 2, timeout=20) == [2, 2]


@pytest.mark.parametrize("leaver", few([0, 1, 2], 1))
def test_a_rank_that_leaves_ends_the_loop_of_all(leaver: int) -> None:
    """By a break after its step; the loops that follow, also of that loader, are whole again."""

    def on_rank() -> list[int]:
        counts = []
        loader = dispatched(Numbers(36))
        for leaves_at in (1, 3, 6):
            taken = 0
            for _ in loader:
                taken += 1
                dw.barrier()
                if rank() == leaver and taken == leaves_at:
                    break
            counts.append(taken)
        for _ in loader:
            break
        return [*counts, len(list(loader))]

    assert run_ranks(on_rank, 3, timeout=60) == [[1, 3, 6, 6]] * 3


def test_in_step_with_others() -> None:
    """Under `lockstep` too, whose stop and skip are of all ranks, and with a collective in the loop."""

    def on_rank() -> tuple[list[list[int]], int]:
        steps = lockstep(dispatched(Numbers(24)), skip=lambda batch: 4 in batch)
        seen = []
        for batch in steps:
            seen.append(dw.gather(batch).tolist())
            if rank() == 1 and len(seen) == 3:
                steps.stop()
        for _ in lockstep(dispatched(Numbers(24))):
            if rank() == 1:
                break
        return seen, steps.skipped

    assert run_ranks(on_rank, 2, timeout=60) == [([[0, 1, 2, 3], [8, 9, 10, 11], [12, 13, 14, 15]], 1)] * 2


def test_training_is_that_of_one_process() -> None:
    """A loop over dispatched batches has the weights of one process that steps over the batches of a turn at once."""

    def trained() -> list[float]:
        torch.manual_seed(1)
        model: Any = dw.wrap_model(torch.nn.Linear(1, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = dispatched(Numbers(24), batch_size=4 // world_size())
        for batch in loader:
            model(batch.double()[:, None]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dw.print(torch.rand(1))
        return [p.item() for p in model.parameters()] + torch.rand(2).tolist()

    [alone] = run_ranks(trained, 1)
    for found in run_ranks(trained, 2):
        assert found[:2] == pytest.approx(alone[:2], rel=0, abs=1e-12)
    first, second = run_ranks(trained, 2)
    assert first == second, "reading has changed the loop's random numbers on rank 0"


def test_ranks_of_one_copy_get_the_same_batches() -> None:
    """Under tensor parallelism both ranks compute one share, and rank 0 still reads alone."""

    def on_rank() -> list[list[int]]:
        return [batch.tolist() for batch in dispatched(Numbers(6))]

    run = distributed(strategy=TP, nprocs=2, launcher="forkserver", returns="all", timeout=60)(on_rank)
    assert run() == [[[0, 1], [2, 3], [4, 5]]] * 2


def test_the_position_is_rank_zeros() -> None:
    """What rank 0 saves holds for any number of ranks: all batches that were given out are behind it."""

    def begun(steps: int) -> dict[str, Any]:
        loader = dispatched(Resumable(24))
        for taken, _ in enumerate(loader, 1):
            if taken == steps:
                return dict(loader.state_dict())
        return {}

    def rest(state: dict[str, Any]) -> list[list[int]]:
        loader = dispatched(Resumable(24))
        loader.load_state_dict(state)
        return [batch.tolist() for batch in loader]

    state, other = run_ranks(begun, 2, 2)
    assert other.keys() < state.keys()
    plain = [batch.tolist() for batch in DataLoader(Resumable(24), batch_size=2)]
    for ranks in (2, 3):
        assert run_ranks(rest, ranks, state) == expected(plain[4:], "drop", ranks)


def test_a_skip_is_of_turns() -> None:
    """`skip` leaves out so many batches of each rank."""

    def on_rank() -> list[list[int]]:
        return [batch.tolist() for batch in dispatched(Numbers(24)).skip(2)]

    plain = [batch.tolist() for batch in DataLoader(Numbers(24), batch_size=2)]
    assert run_ranks(on_rank, 2) == expected(plain[4:], "drop", 2)


def test_what_cannot_be_dispatched_is_refused() -> None:
    """A dataset with indices needs nobody to send it; one that was divided would be read in part."""
    with standing_on(1, 2):
        with pytest.raises(LoaderError, match="is for an IterableDataset"):
            shard_loader(DataLoader(range(4)), split="dispatch")  # type: ignore[arg-type]
        datasets = pytest.importorskip("datasets")
        from datasets.distributed import split_dataset_by_node

        stream = datasets.Dataset.from_dict({"n": list(range(8))}).to_iterable_dataset(num_shards=2)
        with pytest.raises(LoaderError, match=r"by_node\(\) already"):
            dispatched(split_dataset_by_node(stream, 1, 2))
