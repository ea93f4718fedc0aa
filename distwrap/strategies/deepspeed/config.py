"""DeepSpeed's configuration: the user's own, the strategy's options, and conflicts between the two.

Source: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from distwrap.errors import OptionError

# Entries that are the loop's business: it makes optimizer and scheduler, and loops over micro-batches.
_OF_LOOP = {
    "optimizer": "make it in the loop, as torch.optim.AdamW(model.parameters()) or deepspeed.ops.adam.FusedAdam(…)",
    "scheduler": "make it in the loop, out of torch.optim.lr_scheduler or deepspeed.runtime.lr_schedules",
    "managed_gradient_accumulation": "the loop says when to step",
}
_HALVES = ("fp16", "bf16")


def read(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return a configuration from a dict or the path of a JSON file, without entries such as "auto".

    Raises:
        OptionError: there is no such file, or it holds no JSON object.
    """
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError, TypeError) as error:
            raise OptionError(f"DeepSpeedStrategy(config={config!r}): no JSON file: {error}") from None
    if not isinstance(config, Mapping):
        raise OptionError(f"DeepSpeedStrategy(config=…): it holds a {type(config).__name__}, not a dict of options.")
    return _without_auto(config)


def stage_of(given: Mapping[str, Any], stage: int | None) -> int:
    """Return ZeRO's stage from the configuration or from the strategy's option.

    Raises:
        OptionError: the two disagree, or it is not 1, 2 or 3.
    """
    own = _section(given, "zero_optimization").get("stage")
    if None not in (own, stage) and own != stage:
        raise OptionError(
            f"DeepSpeedStrategy(stage={stage}), and the config's zero_optimization says stage {own}. Give it "
            "in one of them only."
        )
    found = own if stage is None else stage
    found = 2 if found is None else found
    if found not in (1, 2, 3) or isinstance(found, bool):
        raise OptionError(f"DeepSpeedStrategy(stage={found!r}): it is 1, 2 or 3; without ZeRO use strategy='ddp'.")
    return int(found)


def refuse(given: Mapping[str, Any], precision: str) -> None:
    """Refuse a configuration that contradicts the loop or the run.

    Args:
        given: the user's configuration.
        precision: the precision of the run.

    Raises:
        OptionError: an entry does; the message says what to write instead.
    """
    for name, way in _OF_LOOP.items():
        if given.get(name):
            raise OptionError(
                f"DeepSpeed's config has {name!r}, which is the loop's own business: leave it out, and {way}."
            )
    steps = given.get("gradient_accumulation_steps", 1)
    if steps != 1:
        raise OptionError(
            f"DeepSpeed's config has gradient_accumulation_steps={steps}, and the loop accumulates by itself: leave it "
            f"out, and iterate over distwrap.accumulate(loader, {steps}, model)."
        )
    for name in _HALVES:
        section = _section(given, name)
        if section.get("enabled") and precision != name:
            raise OptionError(
                f"DeepSpeed's config enables {name!r}, and the run has precision={precision!r}: say "
                f"precision={name!r}, or leave the section out."
            )
        if precision == name and section.get("enabled") is False:
            raise OptionError(f"precision={name!r}, and DeepSpeed's config says that {name!r} is not enabled.")


def engine_config(
    given: Mapping[str, Any], *, stage: int, offload: str | None, nvme_path: str | None, precision: str
) -> dict[str, Any]:
    """Return the whole configuration of an engine, in which the user's entries take precedence.

    Args:
        given: the user's configuration, checked by `refuse`.
        stage: the stage of ZeRO.
        offload: ``"cpu"`` or ``"nvme"``, the place of the optimizer's states, and under stage 3 of the weights.
        nvme_path: a folder on the device for ``"nvme"``.
        precision: the precision of the run.

    Example:
        >>> engine_config({}, stage=3, offload="cpu", nvme_path=None, precision="bf16")["zero_optimization"]["stage"]
        3
    """
    config: dict[str, Any] = {
        "gradient_clipping": 0.0,  # new versions clip to 1.0 by default, which silently changes training
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,  # for the user's own optimizer
        "zero_force_ds_cpu_optimizer": False,
        **deepcopy(dict(given)),
        "managed_gradient_accumulation": False,
        "gradient_accumulation_steps": 1,
    }
    if "train_batch_size" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", 1)
    zero = {"stage": stage, **_section(config, "zero_optimization")}
    if offload is not None:
        where = {"device": offload, **({"nvme_path": nvme_path} if nvme_path is not None else {})}
        zero.setdefault("offload_optimizer", where)
        if stage == 3:
            zero.setdefault("offload_param", dict(where))
    config["zero_optimization"] = zero
    if precision in _HALVES:
        config[precision] = {"enabled": True, **_section(config, precision)}
    return config


def on_nvme(config: Mapping[str, Any]) -> set[str]:
    """Return what an engine with this configuration keeps on NVMe: ``"optimizer"``, ``"param"``, both or none."""
    zero = _section(config, "zero_optimization")
    return {name for name in ("optimizer", "param") if _section(zero, f"offload_{name}").get("device") == "nvme"}


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the entries that a trainer would fill in."""
    sections = {name: _without_auto(value) if isinstance(value, Mapping) else value for name, value in config.items()}
    return {name: value for name, value in sections.items() if value != "auto"}
