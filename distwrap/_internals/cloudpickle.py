"""Private names of cloudpickle: the table of classes that it has pickled by value.

Every function says which names it relies on, and what happens without them; all were seen in versions 3.0 to 3.1.
"""


def tracker_of(cls: type) -> str | None:
    """Return the name under which cloudpickle knows a class in every process, or ``None``.

    Relies on ``cloudpickle.cloudpickle:_DYNAMIC_CLASS_TRACKER_BY_CLASS``.
    Without it: the caller gets its own class back as an equal one, which ``except`` does not recognise.
    """
    from cloudpickle import cloudpickle

    tracker: str | None = getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {}).get(cls)
    return tracker


def class_of(tracker: str) -> type:
    """Return the class with a name of `tracker_of`.

    Relies on ``cloudpickle.cloudpickle:_DYNAMIC_CLASS_TRACKER_BY_ID``.
    Without it: unpickling the class raises AttributeError.

    Raises:
        AttributeError: cloudpickle has no class with this name.
    """
    from cloudpickle import cloudpickle

    cls: type | None = getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {}).get(tracker)
    if cls is None:
        raise AttributeError(f"cloudpickle knows no class under {tracker!r}")
    return cls
