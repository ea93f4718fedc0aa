"""Write a checkpoint, now or in the background: by rank 0 alone, or each rank its part."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from distwrap.checkpoint import files, retention
from distwrap.checkpoint.background import Writer
from distwrap.checkpoint.formats import CheckpointIO
from distwrap.checkpoint.on_ranks import do_on_ranks, first_problem
from distwrap.checkpoint.pieces import Gathering, Piece, PieceGroup, leaves
from distwrap.checkpoint.plain import on_cpu, plain
from distwrap.checkpoint.safetensors_format import check_replaceable, is_folder_of
from distwrap.errors import CheckpointError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.collectives import gather_object
from distwrap.group.world import current_world
from distwrap.nesting import rebuilt


def write_file(state: Any, path: Path, keep: int | None, io: CheckpointIO, *, background: bool) -> None:
    """Write a checkpoint on rank 0, to which the other ranks send their pieces of divided tensors.

    Args:
        state: the state of each rank, with a `Piece` for each divided tensor.
        path: the file.
        keep: the number of checkpoints to keep.
        io: the format.
        background: copy the state, and write in the background.
    """
    what, name, placement = f"the checkpoint {path}", f"save {path}", current_world().placement
    writer, here = current_world().part(Writer), placement.rank == 0
    pieces = leaves(state, Piece)
    if not pieces:
        do_on_ranks(lambda: _write_alone(state, path, keep, io, background=background), what, name)
        return
    gathering, everybody = Gathering(pieces), range(placement.world_size)
    own: list[Any] = [pieces]

    def prepare() -> None:
        writer.wait()
        if here:
            own[:] = [on_cpu(_plain(state)), files.place_of(path, folder=is_folder_of(io, path))]

    def write(state: Any) -> None:
        group, wholes, ends = current_world().part(PieceGroup), gathering.run(leaves(state, Piece)), ExitStack()

        def end() -> None:
            """Receive all remaining tensors, also if the writing failed, and raise what a rank could not send."""
            failed = None
            try:
                for _ in wholes:
                    pass
            except Exception as error:  # noqa: BLE001 - every rank raises it
                failed = error
            if (problem := first_problem(failed, group.gather_text)) is not None:
                raise problem from failed

        def stream(temporary: Path) -> None:
            io.stream(state, temporary, wholes)  # type: ignore[attr-defined]
            ends.pop_all()
            end()  # before the file is renamed

        with ends:
            ends.callback(end)
            if here:
                _put(own[1], keep, io, stream)

    do_on_ranks(prepare, what, f"{name} state", everybody)  # no rank sends if rank 0 cannot write
    if background:
        do_on_ranks(lambda: writer.write(own[0], write, what, tells=here), what, f"{name} copy", everybody)
    else:
        do_on_ranks(lambda: write(own[0]), what, name, everybody)


def write_parts(state: Any, path: Path, keep: int | None, io: CheckpointIO, *, background: bool) -> None:
    """Write a checkpoint to a folder, each rank its part.

    Args:
        state: the state of each rank, with a ``DTensor`` for each divided tensor.
        path: the folder.
        keep: the number of checkpoints to keep.
        io: the format; in the background one that has `over`.
        background: copy the state, and write in the background.
    """
    check_collectives_allowed("save() of a sharded checkpoint")
    what, name, placement = f"the checkpoint {path}", f"save {path}", current_world().placement
    writer, everybody = current_world().part(Writer), range(placement.world_size)
    here, made = placement.rank == 0, [""]
    plain_state: list[Any] = []
    place = Path(os.path.realpath(path))

    def make_room() -> None:
        writer.wait()
        files.place_of(path, folder=True)
        if hasattr(io, "check_replaceable"):
            io.check_replaceable(place)
        made[0] = files.new_folder(place).name

    def prepare() -> None:
        if not temporary.is_dir():
            raise CheckpointError(
                f"rank 0 has made a folder in {place.parent}, and {socket.gethostname()} does not see it. A "
                "checkpoint to which all ranks write must be on a disk that all nodes see"
            )
        plain_state.append(plain(state))

    def write_part() -> None:
        with files.full_disk_told(place.parent):
            io.save(plain_state[0], temporary)

    def finish() -> None:
        files.put_folder(temporary, place)
        retention.prune(place, keep)

    def write(state: Any) -> None:
        group, failed = current_world().part(PieceGroup), None
        try:
            with files.full_disk_told(place.parent):
                io.over(group.group).save(state, temporary)  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - rank 0 raises it
            failed = error
        problem = first_problem(failed, group.gather_text)
        with _gone_if_failed(temporary, here):
            if problem is not None:
                raise problem from failed
            if here:
                finish()

    do_on_ranks(make_room, what, name)
    temporary = place.parent / gather_object(made[0])[0]
    with _gone_if_failed(temporary, here):
        # The writing may be a collective, so all ranks prepare first.
        do_on_ranks(prepare, what, f"{name} state", everybody)
        if background:
            current_world().part(PieceGroup)

            def copy() -> None:
                writer.write(plain_state[0], write, what, tells=here)

            do_on_ranks(copy, what, f"{name} copy", everybody)
            return
        do_on_ranks(write_part, what, f"{name} part", everybody)
        do_on_ranks(finish, what, name)


@contextmanager
def _gone_if_failed(temporary: Path, here: bool) -> Iterator[None]:
    """Remove an unfinished folder, which may fill the disk, if the ``with`` raises."""
    try:
        yield
    except BaseException:
        if here:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_alone(state: Any, path: Path, keep: int | None, io: CheckpointIO, *, background: bool) -> None:
    writer, place = current_world().part(Writer), files.place_of(path, folder=is_folder_of(io, path))
    plain_state = _plain(state)

    def write(state: Any) -> None:
        _put(place, keep, io, lambda temporary: io.save(state, temporary))

    if background:
        writer.write(plain_state, write, f"the checkpoint {path}")
    else:
        writer.wait()  # an earlier state must not replace a later one
        write(on_cpu(plain_state))


def _put(place: Path, keep: int | None, io: CheckpointIO, write: Any) -> None:
    """Write a file or folder, as the format needs, and remove older checkpoints."""
    if is_folder_of(io, place):
        files.write_folder(place, write, lambda: check_replaceable(place))
    else:
        files.write_atomically(place, write, lambda: retention.keep_predecessors(place, keep))
    retention.prune(place, keep)


def _plain(state: Any) -> Any:
    return rebuilt(plain(state), _refuse_piece)


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
