"""Loaders that go on over one iterator for ever, to keep their workers, as timm's and ultralytics' do."""

from typing import Any

from distwrap.data.sharded import Loader, copied
from distwrap.errors import LoaderError


def with_epochs(loader: Loader, held: list[str]) -> Loader:
    """Return a copy of an endless loader, as timm's and ultralytics' are, whose sampler is the one that is repeated.

    Their aim, workers that outlive an epoch, is torch's ``persistent_workers``.

    Args:
        loader: of a class of its own.
        held: its attributes that hold an iterator over it.

    Raises:
        LoaderError: the sampler is not one that repeats another.
    """
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    repeating: Any = getattr(loader, name)
    if hasattr(repeating, "__len__") or not hasattr(repeating, "sampler"):
        raise LoaderError(
            f"the {type(loader).__name__} holds an iterator in its attribute {held[0]!r}, made before the loader was "
            f"sharded, which would go on over undivided data. Make the iterator in __iter__, or shard a plain "
            f"DataLoader with persistent_workers=True."
        )
    plain: dict[str, Any] = {**dict.fromkeys(held), name: repeating.sampler}
    return copied(loader, {**plain, "persistent_workers": loader.num_workers > 0}, type(loader))
