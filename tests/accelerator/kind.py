"""The pretended devices' kind, which distwrap finds by the entry point of an installed package."""

from distwrap.devices.kinds import DeviceKind


class Pretended(DeviceKind):
    visible_by = "PRETEND_VISIBLE_DEVICES"
    counts_untouched = True

    def __init__(self) -> None:
        super().__init__("pretend")
