"""DeepSpeed's configuration, and what our options make of it: all of it without the package."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from distwrap.errors import OptionError
from distwrap.options import Options
from distwrap.registry import strategies
from distwrap.strategies.deepspeed import DeepSpeedStrategy, config


def engine_config(given: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the configuration of an engine of stage 2 in full precision, but for what is said."""
    return config.engine_config(given, **{"stage": 2, "offload": None, "nvme_path": None, "precision": "32", **options})


def test_it_changes_no_number_by_itself() -> None:
    """New versions clip to 1.0 where nobody has asked for it."""
    made = engine_config({})
    assert (made["gradient_clipping"], made["gradient_accumulation_steps"]) == (0.0, 1)
    assert not made["managed_gradient_accumulation"]
    assert engine_config({"gradient_clipping": 0.5})["gradient_clipping"] == 0.5


def test_the_users_own_holds() -> None:
    """What is in a config stays, and what is not said in it is added; the user's own dict is left as it is."""
    given = {"zero_optimization": {"reduce_bucket_size": 1000, "offload_optimizer": {"device": "none"}}, "custom": [1]}
    before = json.dumps(given)
    made = engine_config(given, stage=3, offload="cpu")
    assert made["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 1000,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "cpu"},
    }
    made["custom"].append(2)
    assert json.dumps(given) == before


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_half_precision_is_deepspeeds_own(precision: str) -> None:
    """Its section is enabled, beside what the user says in it."""
    made = engine_config({"fp16": {"initial_scale_power": 8}}, precision=precision)
    assert made[precision]["enabled"]
    assert made["fp16"]["initial_scale_power"] == 8


def test_a_file_and_words_to_fill_in(tmp_path: Path) -> None:
    """A path is read; "auto" is what others fill in, and is left out."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": {"stage": 3, "overlap_comm": "auto"}}))
    strategy = DeepSpeedStrategy(config=path)
    assert (strategy.stage, strategy.config) == (3, {"zero_optimization": {"stage": 3}})
    assert strategies.make(f"deepspeed(config={str(path)!r})").stage == 3  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(strategy)).config == strategy.config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, r"stage=4\): it is 1, 2 or 3; without ZeRO use strategy='ddp'"),
        ({"stage": 0}, r"it is 1, 2 or 3; without ZeRO use strategy='ddp'"),
        ({"stage": True}, r"it is 1, 2 or 3"),
        ({"stage": 2, "config": {"zero_optimization": {"stage": 3}}}, r"stage=2\), and the config's .* stage 3"),
        ({"offload": "disk"}, r"offload='disk'\): it is None, 'cpu' or 'nvme'"),
        ({"offload": "nvme"}, r"offload='nvme' and nvme_path='/folder/on/it' go together"),
        ({"offload": "nvme", "nvme_path": "/x"}, r"only stage=3 does"),
        ({"checkpointing": "some"}, r"it is False, True or 'selective'"),
        ({"config": "/nowhere.json"}, r"no JSON file: .*No such file"),
        ({"config": 3}, r"no JSON file"),
        ({"stagee": 3}, "stagee"),
    ],
)
def test_wrong_options_are_refused_when_they_are_given(options: dict[str, Any], message: str) -> None:
    """Each with what it may be."""
    with pytest.raises((OptionError, TypeError), match=message):
        DeepSpeedStrategy(**options)


@pytest.mark.parametrize(
    ("given", "precision", "message"),
    [
        (
            {"optimizer": {"type": "AdamW"}},
            "32",
            r"'optimizer', which is the loop's own business: leave it out, and "
            r"make",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, "32", r"'scheduler', which is the loop's"),
        ({"gradient_accumulation_steps": 4}, "32", r"iterate over distwrap.accumulate\(loader, 4, model\)"),
        ({"fp16": {"enabled": True}}, "32", r"enables 'fp16', and the run has precision='32'"),
        ({"bf16": {"enabled": True}}, "fp16", r"enables 'bf16', and the run has precision='fp16'"),
        ({"bf16": {"enabled": False}}, "bf16", r"says that 'bf16' is not enabled"),
    ],
)
def test_what_the_config_and_the_run_disagree_about(given: dict[str, Any], precision: str, message: str) -> None:
    """It is refused by the entry's name, with what to write."""
    with pytest.raises(OptionError, match=message):
        config.refuse(given, precision)


def test_the_config_and_the_run_agree() -> None:
    """A section that says what the run says is fine."""
    config.refuse({"bf16": {"enabled": True}, "fp16": {"enabled": False}, "gradient_accumulation_steps": 1}, "bf16")


def test_a_missing_package_is_told_before_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the line that installs it, and what needs none."""
    monkeypatch.setattr("distwrap.packages.find_spec", lambda name: None)
    with pytest.raises(OptionError, match="pip install"):
        DeepSpeedStrategy().check(Options())
