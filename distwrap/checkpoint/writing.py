"""Write a checkpoint, now or in the background: by one rank, or each rank its part."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distwrap.checkpoint import files, retention
from distwrap.checkpoint.background import Writer
from distwrap.checkpoint.formats import CheckpointIO
from distwrap.checkpoint.meeting import SaveMeetings, failure, first_problem, problem_of
from distwrap.checkpoint.pieces import Gathering, Piece, PieceGroup, leaves
from distwrap.checkpoint.plain import on_cpu, plain
from distwrap.checkpoint.safetensors_format import check_replaceable, is_folder_of
from distwrap.errors import CheckpointError
from distwrap.group.world import current_world
from distwrap.nesting import rebuilt


class Save:
    """One save: `prepare`, `write` and `commit`, after each of which the ranks that work together agree.

    Args:
        state: the state of each rank, with a `Piece`, or in a format of parts a ``DTensor``, for each divided tensor.
        path: the file or folder.
        keep: the number of checkpoints to keep.
        io: the format; in the background, if all ranks write, one that has `over`.
        alone: this rank saves by itself.
    """

    def __init__(self, state: Any, path: Path, keep: int | None, io: CheckpointIO, *, alone: bool) -> None:
        self._state, self._path, self._keep, self._io, self._alone = state, path, keep, io, alone
        self._what, self._name = f"the checkpoint {path}", f"save {path}"
        self._rank = current_world().placement.rank
        self._here = alone or self._rank == 0  # this rank gives the file its name
        self._pieces: list[Piece] = [] if io.collective else leaves(state, Piece)
        self._all_work = io.collective or bool(self._pieces)
        self._gathering = Gathering(self._pieces) if self._pieces else None
        self._unfinished: files.Unfinished | None = None
        self._temporary = Path()
        self._group: PieceGroup | None = None

    def run(self, *, differs: str, background: bool) -> None:
        """Save, or copy the state and write in the background.

        Args:
            differs: how this rank's save differs from that of rank 0, if it does.
            background: whether to write in the background.
        """
        told = self._step(lambda: self._prepare(differs), by_all=True)
        if self._io.collective:
            self._temporary = self._place().parent / told
            self._step(self._check_room, by_all=True)
        if background:
            self._step(self._copy, by_all=self._all_work)
        elif self._all_work:
            self._step(lambda: self._write(self._state, self._io), by_all=True)
            self._step(self._commit, by_all=False)
        else:
            self._step(self._write_and_commit, by_all=False)

    def _place(self) -> Path:
        return Path(os.path.realpath(self._path))

    def _prepare(self, differs: str) -> None:
        """Wait for the save before, make room for this one, and take the state as it is now."""
        if differs:
            raise CheckpointError(differs)
        current_world().part(Writer).wait()  # an earlier state must not replace a later one
        is_folder = self._io.collective or is_folder_of(self._io, self._path)
        if self._here:
            place = files.place_of(self._path, folder=is_folder)
            if hasattr(self._io, "check_replaceable"):
                self._io.check_replaceable(place)
            elif is_folder and not self._io.collective:
                check_replaceable(place)
            self._unfinished = files.Unfinished(self._place() if self._io.collective else place, folder=is_folder)
            self._temporary = self._unfinished.temporary
        if self._io.collective:
            self._state = plain(self._state)
        elif self._here:
            self._state = rebuilt(plain(self._state), _refuse_piece)
        else:
            self._state = self._pieces

    def _check_room(self) -> None:
        if not self._temporary.is_dir():
            raise CheckpointError(
                f"rank 0 has made a folder in {self._temporary.parent}, and {socket.gethostname()} does not see it. A "
                "checkpoint to which all ranks write must be on a disk that all nodes see"
            )

    def _copy(self) -> None:
        """Copy the state, and begin to write it in the background."""
        if self._all_work:  # made by all ranks, and found here: a rank that fails has left its world
            self._group = current_world().part(PieceGroup)
        if self._here or self._all_work:
            current_world().part(Writer).write(self._state, self._write_later, tells=self._here)

    def _write(self, state: Any, io: CheckpointIO) -> None:
        """Write a state under another name: the numbers of each rank, that come to this one or are written here."""
        if self._gathering is not None and not self._here:
            for _ in self._gathering.run(leaves(state, Piece)):
                pass
            return
        if not self._here and not self._io.collective:
            return
        state = state if self._io.collective else on_cpu(state)
        with files.full_disk_told(self._place().parent):
            if self._gathering is None:
                io.save(state, self._temporary)
                return
            wholes = self._gathering.run(leaves(state, Piece))
            try:
                io.stream(state, self._temporary, wholes)  # type: ignore[attr-defined]
            finally:
                for _ in wholes:  # so that no rank waits to send
                    pass

    def _write_and_commit(self) -> None:
        if self._here:
            self._write(self._state, self._io)
            self._commit()

    def _write_later(self, state: Any) -> None:
        """Write and commit a copy in the background, where ranks agree over a group of their own."""
        failed: Exception | None = None
        try:
            try:
                self._write(state, self._io_of_background())
            except Exception as error:  # noqa: BLE001 - every rank raises it
                failed = error
            if self._group is not None:
                failed = first_problem(failed, self._group.gather_text) or failed
            if failed is not None:
                raise failed
            self._commit()
        except Exception as error:
            what = f"{self._what}, in the background,"
            raise failure(*problem_of(error, what, is_written=self._is_written)) from error
        finally:
            self._discard()

    def _io_of_background(self) -> CheckpointIO:
        over = getattr(self._io, "over", None)
        if over is None or self._group is None or not self._io.collective:
            return self._io
        found: CheckpointIO = over(self._group.group)
        return found

    def _commit(self) -> None:
        """Give the checkpoint its name, and remove older ones."""
        if self._unfinished is None:
            return
        before = (lambda: None) if self._temporary.is_dir() else self._keep_predecessors
        self._unfinished.put(before)
        retention.prune(self._unfinished.path, self._keep)

    def _keep_predecessors(self) -> None:
        assert self._unfinished is not None
        retention.keep_predecessors(self._unfinished.path, self._keep)

    @property
    def _is_written(self) -> bool:
        return self._unfinished is not None and self._unfinished.has_name

    def _discard(self) -> None:
        if self._unfinished is not None:
            self._unfinished.discard()

    def _step(self, work: Callable[[], None], *, by_all: bool) -> str:
        """Do a part of the save, raise the first problem of any rank, and return the name of what rank 0 writes to.

        Args:
            work: the part.
            by_all: whether all ranks have done a part, and not rank 0 alone.
        """
        cause: BaseException | None = None
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - all ranks raise it
            cause = error
        problem, told = problem_of(cause, self._what, is_written=self._is_written), self._temporary.name
        meetings = current_world().part(SaveMeetings)
        try:
            if self._alone:
                first, follows = problem
            elif by_all:
                first, follows, told = meetings.agree(self._name, problem, told)
            else:
                first, follows = meetings.hear(self._name, problem)
            if cause is not None and not isinstance(cause, Exception):
                raise cause
            if first:
                raise failure(first, follows) from cause
        except BaseException:
            self._discard()
            raise
        return told


def _refuse_piece(leaf: Any, path: tuple[Any, ...]) -> Any:
    if hasattr(leaf, "full_tensor") and any(  # a DTensor, whose class takes long to import
        ranks > 1 and not placement.is_replicate()
        for placement, ranks in zip(leaf.placements, leaf.device_mesh.shape, strict=True)
    ):
        where, rank = "".join(f"[{key!r}]" for key in path), current_world().placement.rank
        raise CheckpointError(
            f"state{where} is a DTensor, of which rank {rank} has a piece. Give save() the model and the optimizer "
            f"themselves: save({{'model': model, 'optimizer': optimizer}}, path)"
        )
    return leaf
