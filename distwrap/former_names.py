"""Names under which other packages know strategies that are here, and those that name a launcher too."""

_LAUNCHERS = ("spawn", "fork", "forkserver", "script")
_UNUSED = {
    f"find_unused_parameters_{word}": f"ddp(find_unused_parameters={word.title()})" for word in ("true", "false")
}

# What became of FairScale's, Lightning's, DeepSpeed's and FSDP's names, also as an older Lightning spelt them.
BECAME = {
    **dict.fromkeys(("zero", "oss", "zero_dp_1"), "zero1"),
    **dict.fromkeys(("ddp_sharded", "ddp_sharded_spawn", "sharded_ddp", "fairscale"), "zero2"),
    "zero_dp_2": "zero2",
    **{f"ddp_sharded{middle}_find_unused_parameters_false": "zero2" for middle in ("", "_spawn")},
    **{f"ddp_{words}": strategy for words, strategy in _UNUSED.items()},
    **{f"ddp_{how}_{words}": _UNUSED[words] for how in ("spawn", "fork", "notebook") for words in _UNUSED},
    **dict.fromkeys(("fsdp_native", "fully_sharded", "ddp_fully_sharded", "full_shard", "fsdp2"), "fsdp"),
    **dict.fromkeys(("zero3", "zero_dp_3"), "fsdp"),
    **dict.fromkeys(("fsdp_cpu_offload", "fsdp_native_full_shard_offload"), "fsdp(cpu_offload=True)"),
    **{f"deepspeed_stage_{stage}": f"deepspeed(stage={stage})" for stage in (1, 2, 3)},
    **{f"deepspeed_stage_{stage}_offload": f"deepspeed(stage={stage}, offload='cpu')" for stage in (1, 2, 3)},
    "deepspeed_stage_3_offload_nvme": "deepspeed(stage=3, offload='nvme', nvme_path='/local_nvme')",  # its default
    "model_parallel": "tp",
    "collaborative": "hivemind",
    "single_device": "single",
    "shard_grad_op": "fsdp(reshard_after_forward=False)",
    "no_shard": "ddp",
    "hpu_parallel": "of_device(type='hpu')",
    "hpu_single": "of_device(type='hpu', strategy='single')",
    "mps": "of_device(type='mps', strategy='single')",
    **dict.fromkeys(("xla", "tpu_spawn"), "of_device(type='xla')"),
    **dict.fromkeys(("single_tpu", "single_xla"), "of_device(type='xla', strategy='single')"),
    "xla_fsdp": "of_device(type='xla', strategy='fsdp')",
}

# A strategy and a launcher in one word: spellings of ours, of Lightning ("ddp_notebook") and of people in a hurry.
LAUNCHER_OF_STRATEGY = {
    **{f"ddp_{launcher}": launcher for launcher in _LAUNCHERS},
    **{launcher: launcher for launcher in ("spawn", "fork", "forkserver")},
    "ddp_notebook": "forkserver",
    **{f"ddp_sharded_spawn{words}": "spawn" for words in ("", "_find_unused_parameters_false")},
    **{f"ddp_{launcher}_{words}": launcher for launcher in ("spawn", "fork") for words in _UNUSED},
    **{f"ddp_notebook_{words}": "forkserver" for words in _UNUSED},
    **dict.fromkeys(("xla", "tpu_spawn", "single_tpu", "single_xla"), "xla"),
}

# What to say of a name that is none here.
HINTS = {
    **dict.fromkeys(
        ("gpu", "cuda", "rocm", "xpu", "npu", "hpu", "mlu", "musa"),
        "A device is not named: write 'ddp', which takes the accelerator that torch has.",
    ),
    **dict.fromkeys(("pp", "gpipe", "1f1b"), "Did you mean 'pipeline'?"),
    **dict.fromkeys(("tensor_parallel", "megatron"), "Did you mean 'tp'?"),
    "tpu": "Did you mean 'xla'?",
}

# Lightning's strategies that have no place here: what each was, what became of it, and what to write.
GONE = {
    "colossalai": "it was ColossalAI's Gemini in Lightning, whose package needs GPUs and a torch of 2024: write "
    "'fsdp', which divides the same, or 'fsdp(cpu_offload=True)'.",
    "ipu_strategy": "it was Graphcore's IPUs in Lightning, whose package poptorch has ended: write 'ddp' on an "
    "accelerator that torch has, or 'pipeline' for stages.",
}
