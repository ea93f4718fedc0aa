"""Private names of Hugging Face's datasets.

The function says which name it relies on, and what happens without it; it was seen in version 5.2.
"""

from typing import Any

from distwrap.errors import LoaderError


def is_split_by_node(dataset: Any) -> bool:
    """Return whether an IterableDataset was divided by ``split_dataset_by_node``.

    Relies on ``datasets:Dataset.from_dict({"x": [1]}).to_iterable_dataset()._distributed``.
    Without it: LoaderError, since a dataset that is divided twice would lose samples.

    Raises:
        LoaderError: this version of datasets does not tell.
    """
    if not hasattr(dataset, "_distributed"):
        raise LoaderError(
            "this version of datasets does not tell whether split_dataset_by_node() has divided the dataset. Divide it "
            "yourself, and say shard_loader(loader, split='dataset')."
        )
    return dataset._distributed is not None
