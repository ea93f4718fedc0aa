from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

import distwrap as dw
from distwrap import available_launchers, available_strategies, distributed, setup_process_group, world_size
from distwrap.errors import OptionError
from distwrap.former_names import REMOVED
from distwrap.group.world import say
from distwrap.name_table import Registry
from distwrap.options import Options, switched_on
from distwrap.registry import precisions, strategies
from distwrap.strategies import Strategy
from distwrap.strategies.dp import DPStrategy
from distwrap.strategies.single import SingleStrategy


def given(**options: Any) -> Options:
    return Options().updated(options)


def refusal(**options: Any) -> str:
    with pytest.raises(OptionError) as caught:
        given(**options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("dpp", "ddp"), ("ddp_spwan", "ddp_spawn"), ("singel", "single"), ("FSDP", "fsdp"), ("pp", "pipeline")],
)
def test_a_misspelt_strategy_names_the_nearest(wrong: str, meant: str) -> None:
    """An unknown strategy lists the known ones, and says which was probably meant."""
    message = refusal(strategy=wrong)
    assert message.startswith(f"@distributed: unknown strategy {wrong!r}. Did you mean {meant!r}? Known: ")
    assert all(name in message for name in available_strategies())


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("fsdp3", "fsdp"),
        ("fsp", "fsdp"),
        ("fdsp", "fsdp"),
        ("sdp", "hsdp"),
        ("dsp", "ddp"),
        ("dpd", "ddp"),
        ("fully_sharded_data_parallel", "fsdp"),
        ("zero-3", "zero3"),
        ("ZeRO_2", "zero2"),
        ("deepspeed_stage2", "deepspeed_stage_2"),
        ("deepspeed_zero_3", "deepspeed_stage_3"),
        ("ddp-find-unused-parameters-true", "ddp_find_unused_parameters_true"),
        ("distributed_data_parallel", "ddp"),
        ("horovd", "horovod"),
    ],
)
def test_a_near_strategy_means_the_same(wrong: str, meant: str) -> None:
    """A name is answered with one of the same meaning, and never with "dp", to which every short name is near."""
    assert f"unknown strategy {wrong!r}. Did you mean {meant!r}? Known: " in refusal(strategy=wrong)


@pytest.mark.parametrize("wrong", ["ds", "xp", "dps", "fp", "sp", "dsp", "tpp", "fdp"])
def test_a_name_of_two_letters_is_not_guessed(wrong: str) -> None:
    """A name of two letters, to which any short name is near, is not suggested."""
    assert not any(f"Did you mean {short!r}" in refusal(strategy=wrong) for short in ("dp", "tp"))


@pytest.mark.parametrize(
    "name",
    ["ddp_find_unused_parameters_true", "deepspeed_stage_2", "fsdp2", "horovod", "zero3", "fully_sharded", "auto"],
)
def test_a_strategy_of_others_is_understood(name: str) -> None:
    """Names of Lightning, DeepSpeed and FSDP that mean something here are taken."""
    assert given(strategy=name).strategy


def test_a_misspelt_option_names_the_nearest() -> None:
    """An unknown option lists the known ones, and says which was probably meant."""
    assert refusal(nproc=2).startswith("@distributed: unknown option 'nproc'. Did you mean 'nprocs'? Known: backend, ")


@pytest.mark.parametrize("value", [0, -1, 2.5, 2.0, True, "4", "all", None])
def test_a_wrong_number_of_processes_is_refused(value: object) -> None:
    """nprocs is auto or a whole number of at least 1, and nothing that merely looks like one."""
    message = refusal(nprocs=value)
    assert message.startswith(f"@distributed: nprocs={value!r}: it must be 'auto' or a whole number of at least 1.")


@pytest.mark.parametrize("name", ["nprocs", "timeout", "seed"])
def test_a_number_in_quotes_is_called_a_string(name: str) -> None:
    """A number that came as text, as from a command line, is refused with the way to make it one."""
    assert refusal(**{name: "2"}).endswith("This is a string: give int('2').")
    assert "string" not in refusal(**{name: "two"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "megatron"}, "unknown strategy 'megatron'. Did you mean 'tp'?"),
        ({"strategy": "npu"}, "unknown strategy 'npu'. A device is not named: write 'ddp', which takes"),
        ({"strategy": "tpu"}, "unknown strategy 'tpu'. Did you mean 'xla'?"),
        ({"launcher": "torchrun"}, "unknown launcher 'torchrun'. Ranks that torchrun, srun or mpirun has started are"),
        (
            {"find_unused_parameters": True},
            "unknown option 'find_unused_parameters'. It belongs to wrap_model(model, find_unused_parameters=True), or "
            "to strategy=DDPStrategy(find_unused_parameters=True). Known: ",
        ),
        (
            {"tensor_parallel": 2},
            "unknown option 'tensor_parallel'. It belongs to strategy=FSDPStrategy(tensor_parallel=2).",
        ),
        ({"gpus": 2}, "unknown option 'gpus'. Write nprocs=2. Known: "),
        ({"nproc-per-node": 2}, "unknown option 'nproc-per-node'. Write nprocs=2. Known: "),
        ({"precision": "fp8"}, "unknown precision 'fp8'. Nothing here computes in 8 bits: write 'bf16'. Known: "),
        ({"launcher": "multiprocessing"}, "unknown launcher 'multiprocessing'. Did you mean 'spawn'?"),
    ],
)
def test_what_people_try_is_explained(options: dict[str, Any], message: str) -> None:
    """A name that means something elsewhere is answered with that, not with the nearest name."""
    assert refusal(**options).startswith(f"@distributed: {message}")


@pytest.mark.parametrize("value", [1, 8, numpy.int64(8)])
def test_a_whole_number_of_processes_is_taken(value: Any) -> None:
    """Any whole number of at least 1 will do, numpy's too, and becomes a plain one."""
    assert type(given(nprocs=value).nprocs) is int
    assert given(nprocs=value).nprocs == value


@pytest.mark.parametrize(
    ("spelling", "precision"),
    [
        (32, "32"),
        ("32-true", "32"),
        ("no", "32"),
        ("fp32", "32"),
        ("float32", "32"),
        ("BF16", "bf16"),
        ("bf16-mixed", "bf16"),
        ("bfloat16", "bf16"),
        (16, "fp16"),
        ("16-mixed", "fp16"),
        ("float16", "fp16"),
    ],
)
def test_spellings_of_precision(spelling: str | int, precision: str) -> None:
    """Lightning's and Accelerate's spellings mean our own three precisions."""
    assert given(precision=spelling).precision == precisions.chosen(spelling) == precision


@pytest.mark.parametrize("value", ["bf61", "64", "16-true", 8, True, None])
def test_an_unknown_precision_is_refused(value: object) -> None:
    """A precision that there is not, or that means half-precision weights, is refused with the known ones."""
    message = refusal(precision=value)
    assert message.startswith(f"@distributed: unknown precision {value!r}.")
    assert "Known: 16, 16-mixed, 32" in message


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("ddp_spawn", "spawn"),
        ("ddp_fork", "fork"),
        ("ddp_forkserver", "forkserver"),
        ("ddp_script", "script"),
        ("ddp_notebook", "forkserver"),
        ("spawn", "spawn"),
        ("fork", "fork"),
        ("forkserver", "forkserver"),
    ],
)
def test_strategy_and_launcher_in_one_word(name: str, launcher: str) -> None:
    """A strategy that names a launcher is DDP with that launcher."""
    options = given(strategy=name)
    assert (options.strategy, options.launcher) == ("ddp", launcher)
    assert given(strategy=name, launcher="auto") == given(strategy=name, launcher=launcher) == options
    assert strategies.name_of(name) == "ddp"


def test_a_strategy_that_contradicts_the_launcher_is_refused() -> None:
    """A strategy that names one launcher and a launcher that is another cannot both be meant."""
    message = refusal(strategy="ddp_spawn", launcher="fork")
    assert "strategy='ddp_spawn' means launcher='spawn', but launcher='fork' was given too" in message


@pytest.mark.parametrize("spelling", ["ddp_spawn(static_graph=True)", " ddp_spawn"])
def test_a_strategy_with_a_launcher_takes_no_options(spelling: str) -> None:
    """A strategy that names a launcher is refused where the launcher would be lost."""
    assert "Say strategy='ddp(…)' with launcher='spawn'" in refusal(strategy=spelling)


@pytest.mark.parametrize("strategy", ["single", "dp", "single_device", SingleStrategy(), DPStrategy()])
def test_one_process_contradicts_several(strategy: Any) -> None:
    """A strategy of one process refuses a number of several, and takes 1 and auto."""
    assert re.search(
        r"strategy=\S+ runs in one process, but nprocs=2 was given too", refusal(strategy=strategy, nprocs=2)
    )
    assert given(strategy=strategy, nprocs=1).nprocs == 1
    assert given(strategy=strategy, nprocs="auto").nprocs == "auto"


@pytest.mark.parametrize("launcher", available_launchers())
def test_known_launchers_are_taken(launcher: Any) -> None:
    """Each launcher goes by its name."""
    assert given(launcher=launcher).launcher == launcher


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launcher": "frok"}, "unknown launcher 'frok'. Did you mean 'fork'?"),
        ({"nnodes": 0}, "nnodes=0: it must be a number of nodes, or 'MIN:MAX', as '1:4'"),
        ({"nnodes": "4:1"}, "nnodes='4:1'"),
        ({"nnodes": "many"}, "nnodes='many'"),
        ({"nnodes": True}, "nnodes=True"),
        ({"node_rank": -1}, "node_rank=-1: it must be None or a whole number from 0"),
        ({"node_rank": "0"}, "node_rank='0'"),
        ({"rdzv_endpoint": ""}, "rdzv_endpoint='': it must be None or 'host:port', as 'node1:29400'"),
        ({"rdzv_endpoint": 29400}, "rdzv_endpoint=29400"),
        ({"max_restarts": -1}, "max_restarts=-1: it must be a whole number from 0"),
        ({"max_restarts": 1.5}, "max_restarts=1.5"),
        ({"backend": ""}, "backend='': it must be 'auto' or a name that torch.distributed knows"),
        ({"backend": None}, "backend=None: it must be"),
        ({"seed": -1}, "seed=-1: it must be None or a whole number from 0"),
        ({"seed": 2**63}, "it must be None or a whole number from 0"),
        ({"seed": 1.0}, "seed=1.0: it must be"),
        ({"seed": True}, "seed=True: it must be"),
        ({"timeout": 0}, "timeout=0: it must be a positive number of seconds"),
        ({"timeout": float("inf")}, "timeout=inf: it must be"),
        ({"timeout": float("nan")}, "timeout=nan: it must be"),
        ({"timeout": "60"}, "timeout='60': it must be"),
        ({"timeout": True}, "timeout=True: it must be"),
        ({"returns": "rank1"}, "unknown value for returns 'rank1'. Did you mean 'rank0'?"),
        ({"retrofit": 1}, "retrofit=1: it must be True or False"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(options: dict[str, Any], message: str) -> None:
    """Each option says what it takes, and what it was given."""
    assert message in refusal(**options)


@pytest.mark.parametrize(("text", "nnodes"), [(3, 3), ("3", 3), ("2:2", 2), ("1:4", "1:4")])
def test_numbers_of_machines(text: int | str, nnodes: int | str) -> None:
    """A number, also as text, and a range whose ends differ."""
    assert given(nnodes=text).nnodes == nnodes


def test_an_update_keeps_what_it_does_not_name() -> None:
    """Options over others leave the rest, and the others, as they were."""
    first = given(nprocs=2, seed=3)
    assert first.updated({"nprocs": 4}) == given(nprocs=4, seed=3)
    assert first.nprocs == 2


def test_the_environment_overrides_the_decorator() -> None:
    """Each variable goes over the decorator's argument of its name, read as that argument's type."""
    env = {
        "DISTWRAP_STRATEGY": "ddp_fork",
        "DISTWRAP_NPROCS": "3",
        "DISTWRAP_BACKEND": "gloo",
        "DISTWRAP_PRECISION": "bf16",
        "DISTWRAP_SEED": "7",
        "DISTWRAP_TIMEOUT": "2.5",
        "DISTWRAP_NNODES": "1:4",
        "DISTWRAP_NODE_RANK": "1",
        "DISTWRAP_RDZV_ENDPOINT": "head:29400",
        "DISTWRAP_MAX_RESTARTS": "3",
        "DISTWRAP_LOG_DIR": "logs",
    }
    options = given(strategy="single", seed=1, nprocs="auto").with_environment(env)
    assert options == given(
        strategy="ddp",
        launcher="fork",
        nprocs=3,
        backend="gloo",
        precision="bf16",
        timeout=2.5,
        seed=7,
        nnodes="1:4",
        node_rank=1,
        rdzv_endpoint="head:29400",
        max_restarts=3,
        log_dir="logs",
    )


def test_auto_can_be_said_in_the_environment() -> None:
    """The environment can take a number of processes back."""
    assert given(nprocs=4).with_environment({"DISTWRAP_NPROCS": "auto"}).nprocs == "auto"


@pytest.mark.parametrize("variable", ["STRATEGY", "LAUNCHER", "NPROCS", "BACKEND", "PRECISION", "TIMEOUT"])
def test_an_empty_variable_is_none(variable: str) -> None:
    """An empty variable overrides nothing."""
    assert Options().with_environment({f"DISTWRAP_{variable}": ""}) == Options()


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("DISTWRAP_NPROCS", "two", "DISTWRAP_NPROCS='two': it must be 'auto' or a whole number"),
        ("DISTWRAP_NPROCS", "0", "DISTWRAP_NPROCS: nprocs=0: it must be"),
        ("DISTWRAP_NODE_RANK", "first", "DISTWRAP_NODE_RANK='first': it must be a whole number"),
        ("DISTWRAP_MAX_RESTARTS", "-1", "DISTWRAP_MAX_RESTARTS: max_restarts=-1"),
        ("DISTWRAP_NNODES", "0", "DISTWRAP_NNODES: nnodes='0'"),
        ("DISTWRAP_SEED", "lucky", "DISTWRAP_SEED='lucky': it must be a whole number"),
        ("DISTWRAP_SEED", "-1", "DISTWRAP_SEED: seed=-1: it must be None or a whole number from 0"),
        ("DISTWRAP_NPROC", "4", "unknown variable 'DISTWRAP_NPROC'. Did you mean 'DISTWRAP_NPROCS'?"),
        ("DISTWRAP_DEVICES", "4", "unknown variable 'DISTWRAP_DEVICES'. Write DISTWRAP_NPROCS=4. Known: "),
        ("DISTWRAP_NUM_NODES", "2", "unknown variable 'DISTWRAP_NUM_NODES'. Write DISTWRAP_NNODES=2. Known: "),
        ("DISTWRAP_RETURNS", "all", "unknown variable 'DISTWRAP_RETURNS'. The option returns has no variable: write"),
        ("DISWRAP_NPROCS", "4", "unknown variable 'DISWRAP_NPROCS'. Did you mean 'DISTWRAP_NPROCS'?"),
        ("DIST_WRAP_NPROCS", "4", "unknown variable 'DIST_WRAP_NPROCS'. Did you mean 'DISTWRAP_NPROCS'?"),
        ("distwrap_strategy", "ddp", "unknown variable 'distwrap_strategy'. Did you mean 'DISTWRAP_STRATEGY'?"),
        ("DISTWRAP_TIMEOUT", "soon", "DISTWRAP_TIMEOUT='soon': it must be a number of seconds"),
        ("DISTWRAP_TIMEOUT", "-1", "DISTWRAP_TIMEOUT: timeout=-1.0: it must be"),
        ("DISTWRAP_STRATEGY", "ddq", "DISTWRAP_STRATEGY: unknown strategy 'ddq'. Did you mean 'ddp'?"),
        ("DISTWRAP_LAUNCHER", "swarm", "DISTWRAP_LAUNCHER: unknown launcher 'swarm'."),
        ("DISTWRAP_PRECISION", "bf17", "DISTWRAP_PRECISION: unknown precision 'bf17'. Did you mean 'bf16'?"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str, message: str) -> None:
    """An error of the environment names the variable to change."""
    with pytest.raises(OptionError) as caught:
        Options().with_environment({variable: text})
    assert str(caught.value).startswith(message)


def test_variables_that_contradict_each_other_are_refused() -> None:
    """Two variables that cannot both be meant are refused, and both are named."""
    env = {"DISTWRAP_STRATEGY": "ddp_spawn", "DISTWRAP_LAUNCHER": "fork"}
    with pytest.raises(OptionError, match="DISTWRAP_STRATEGY and DISTWRAP_LAUNCHER: strategy='ddp_spawn' means"):
        Options().with_environment(env)


def test_several_processes_for_a_strategy_of_one_are_refused() -> None:
    """A job script that asks for several processes is not ignored where the decorator says one."""
    with pytest.raises(OptionError, match="DISTWRAP_NPROCS: strategy='single' runs in one process, but nprocs=4"):
        given(strategy="single").with_environment({"DISTWRAP_NPROCS": "4"})


def test_a_strategy_of_one_process_overrides_a_number() -> None:
    """A job script that asks for the strategy of one process has its way where the decorator says four."""
    assert given(nprocs=4).with_environment({"DISTWRAP_STRATEGY": "single"}).strategy == "single"


def test_a_call_goes_before_the_environment_before_the_decorator() -> None:
    """.options() overrides the environment, which overrides the decorator."""
    train = distributed(nprocs=1)(lambda: world_size())
    assert train() == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTWRAP_NPROCS", "2")
        assert train() == 2
        assert train.options(nprocs=3)() == 3


def test_a_variable_of_another_program_is_left_alone() -> None:
    """A variable that is not near to one of ours may be called as it likes."""
    others = {
        "DISPLAY": ":0",
        "WRAP_NPROCS": "2",
        "DIST_URL": "env://",
        "BOOTSTRAP_SEED": "1",
        "SHRINKWRAP_LOG_DIR": "x",
    }
    assert Options().with_environment(others) == Options()


def test_options_of_a_call_are_checked_when_given() -> None:
    """A wrong option is refused by .options() itself, before the call."""
    train = distributed(lambda: None)
    with pytest.raises(OptionError, match=r"^\.options\(\): unknown option 'gpus'\. Write nprocs=2\."):
        train.options(gpus=2)
    with pytest.raises(OptionError, match=r"^\.options\(\): unknown option 'procs'"):
        train.options(procs=2)


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_a_switch_is_on(text: str) -> None:
    """What means yes switches on."""
    assert switched_on({"DISTWRAP_DISABLE": text}, "DISTWRAP_DISABLE")


@pytest.mark.parametrize(("text", "loud"), [("false", True), ("off", True), ("0", True), ("yes", False)])
def test_quiet(text: str, loud: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """DISTWRAP_QUIET is read as any switch: false does not silence the lines at the start."""
    monkeypatch.setenv("DISTWRAP_QUIET", text)
    say("2 ranks")
    assert ("2 ranks" in capsys.readouterr().err) is loud


def test_a_misspelt_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DISTWRAP_QUIET does not know is refused before a start, and where the caller sets up the group."""
    monkeypatch.setenv("DISTWRAP_QUIET", "maybe")
    for call in (distributed(nprocs=2)(lambda: None), setup_process_group):
        with pytest.raises(OptionError, match="DISTWRAP_QUIET='maybe': say 1, true"):
            call()


@pytest.mark.parametrize("text", ["", "0", "False", "no", "off"])
def test_a_switch_is_off(text: str) -> None:
    """What means no, and nothing at all, leaves it off."""
    assert not switched_on({"DISTWRAP_DISABLE": text}, "DISTWRAP_DISABLE")
    assert not switched_on({}, "DISTWRAP_DISABLE")


def test_a_switch_is_read_strictly() -> None:
    """What means neither yes nor no is refused by the call, with what is allowed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTWRAP_DISABLE", "maybe")
        with pytest.raises(OptionError, match=r"DISABLE='maybe': say 1, true, yes or on; or 0, false, no or off"):
            distributed(lambda: None)()


def test_a_disabled_call_stays_in_this_process() -> None:
    """DISTWRAP_DISABLE=1 runs the function here, whatever the options ask."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTWRAP_DISABLE", "1")
        distributed(nprocs=2)(lambda: seen.append(world_size()))()
    assert seen == [1]


@pytest.mark.parametrize(
    ("name", "became", "launcher"),
    [
        ("ddp_sharded", "zero1", "auto"),
        ("ddp_sharded_spawn", "zero1", "spawn"),
        ("fairscale", "zero1", "auto"),
        ("zero2", "fsdp(reshard_after_forward=False)", "auto"),
        ("deepspeed_stage_1", "deepspeed(stage=1)", "auto"),
        ("deepspeed_stage_3_offload", "deepspeed(stage=3, offload='cpu')", "auto"),
        ("ddp_spawn_find_unused_parameters_true", "ddp(find_unused_parameters=True)", "spawn"),
        ("ddp_sharded(static_graph=True)", "zero1(static_graph=True)", "auto"),
    ],
)
def test_another_packages_name_stands_for_what_it_became(name: str, became: str, launcher: str) -> None:
    """Lightning's, FairScale's and DeepSpeed's names are those of the strategies here that do the same."""
    options = given(strategy=name)
    assert (repr(options.strategy), options.launcher) == (repr(strategies.make(became)), launcher)
    assert not isinstance(options.strategy, str)
    assert options.strategy.formerly == name.partition("(")[0]


def test_a_strategy_shows_the_options_that_differ() -> None:
    """As they are written, so that what the line of a start shows can be pasted."""
    for text in (
        "FSDPStrategy(reshard_after_forward=False)",
        "FSDPStrategy(tensor_parallel=2, plan='gpt', check=True)",
        "PipelineStrategy(loss='loss', check=True)",
        "DDPStrategy(static_graph=True)",
        "DDPStrategy()",
    ):
        assert repr(eval(text, {name: getattr(dw, name) for name in dir(dw) if name.endswith("Strategy")})) == text


def test_a_name_of_what_is_not_there_yet_keeps_its_hint() -> None:
    """A name counts from when its strategy is there; an option of a name that has a launcher too is refused."""
    assert "strategy='zero1(…)' with launcher='spawn'" in refusal(strategy="ddp_sharded_spawn(static_graph=True)")
    assert "Say strategy='zero1' with the launcher" in refusal(strategy="ddp_sharded_spawn", launcher="fork")
    registry: Registry[Any] = Registry("strategy", (), "nowhere", former={"old": "new(x=1)"}, hints={"old": "Not yet."})
    with pytest.raises(OptionError, match=r"unknown strategy 'old'. Not yet\."):
        registry.make("old")
    registry.register("new", SimpleNamespace)
    assert registry.make("old(y=2)") == SimpleNamespace(x=1, y=2, formerly="old")


LIGHTNINGS = (  # one word after the other
    "dp ddp ddp2 ddp_spawn ddp_fork ddp_notebook ddp_spawn_find_unused_parameters_false "
    "ddp_find_unused_parameters_true fsdp fsdp_native fsdp_cpu_offload ddp_sharded ddp_sharded_spawn ddp_fully_sharded "
    "deepspeed deepspeed_stage_1 deepspeed_stage_1_offload deepspeed_stage_2 deepspeed_stage_2_offload "
    "deepspeed_stage_3 deepspeed_stage_3_offload deepspeed_stage_3_offload_nvme bagua single_device model_parallel"
)


@pytest.mark.parametrize("name", LIGHTNINGS.split())
def test_lightnings_names_are_known(name: str) -> None:
    """Each makes a strategy of ours; those of a package ask for it at the call, before any process starts."""
    assert isinstance(strategies.make(given(strategy=name).strategy), Strategy)


@pytest.mark.parametrize("name", REMOVED["strategy"])
def test_lightnings_names_of_what_is_gone_say_so_in_a_sentence(name: str) -> None:
    """What it was, what became of it, and a strategy that is here."""
    message = refusal(strategy=name)
    assert message.startswith(f"@distributed: strategy {name!r} is not here: it was ")
    assert "write '" in message
    assert message.count(". ") == 0
    assert any(f"'{each}" in message for each in strategies.names())
