"""Private names of cloudpickle: the table of the classes that it has pickled by value.

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
    """Return the class that cloudpickle knows under a name of `tracker_of`.

    Relies on ``cloudpickle.cloudpickle:_DYNAMIC_CLASS_TRACKER_BY_ID``.
    Without it: AttributeError where the class is unpickled.

    Raises:
        AttributeError: cloudpickle does not know it.
    """
    from cloudpickle import cloudpickle

    cls: type | None = getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {}).get(tracker)
    if cls is None:
        raise AttributeError(f"cloudpickle knows no class under {tracker!r}")
    return cls
