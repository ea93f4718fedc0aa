"""Names under which other packages know strategies that are here, and those that name a launcher too."""

_LAUNCHERS = ("spawn", "fork", "forkserver", "script")
_UNUSED = {
    f"find_unused_parameters_{word}": f"ddp(find_unused_parameters={word.title()})" for word in ("true", "false")
}

# What became of FairScale's, Lightning's, DeepSpeed's and FSDP's names, also as an older Lightning spelt them.
BECAME = {
    **dict.fromkeys(("zero", "oss", "zero_dp_1"), "zero1"),
    **dict.fromkeys(("ddp_sharded", "ddp_sharded_spawn", "sharded_ddp", "fairscale"), "zero1"),
    **{f"ddp_sharded{middle}_find_unused_parameters_false": "zero1" for middle in ("", "_spawn")},
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
    **dict.fromkeys(("shard_grad_op", "zero2", "zero_dp_2"), "fsdp(reshard_after_forward=False)"),
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

_LONG_SEQUENCES = (
    "write 'fsdp(checkpointing=True)', which computes activations again; or call "
    "torch.distributed.tensor.experimental.context_parallel in a loop of your own."
)

# What to say of a name that is none here; capitals, hyphens and underscores make no difference.
HINTS = {
    **dict.fromkeys(
        ("gpu", "cuda", "rocm", "xpu", "npu", "hpu", "mlu", "musa", "cpu", "multi_gpu", "ddp_cpu", "mirrored"),
        "A device is not named: write 'ddp', which takes the accelerator that torch has.",
    ),
    **dict.fromkeys(
        ("data_parallel", "nn.DataParallel"),
        "Write 'ddp', one process a device, or 'dp' for torch's DataParallel, one process over all devices.",
    ),
    **dict.fromkeys(("distributed_data_parallel", "multi_process", "mp"), "Did you mean 'ddp'?"),
    **dict.fromkeys(("fully_sharded_data_parallel", "sharded", "fsdp1"), "Did you mean 'fsdp'?"),
    **dict.fromkeys(("hybrid_shard", "hybrid_shard_zero2", "hybrid_fsdp"), "Did you mean 'hsdp'?"),
    **dict.fromkeys(("pp", "gpipe", "1f1b", "pipeline_parallel", "pipe"), "Did you mean 'pipeline'?"),
    **dict.fromkeys(("tensor_parallel", "megatron", "megatron_lm"), "Did you mean 'tp'?"),
    **dict.fromkeys(
        ("context_parallel", "sequence_parallel", "ulysses", "ring_attention"), f"For long sequences {_LONG_SEQUENCES}"
    ),
    **{
        f"{words}{stage}": f"Did you mean 'deepspeed_stage_{stage}'?"
        for words in ("deepspeed_zero", "deepspeed_", "zero_stage")
        for stage in (1, 2, 3)
    },
    **dict.fromkeys(("none", "no", "serial", "local"), "Did you mean 'single', one process?"),
    **dict.fromkeys(
        ("torchrun", "torch_elastic", "slurm", "mpi", "srun", "elastic", "ray", "external", "notebook", "script"),
        "That starts ranks, and a strategy arranges them: see launcher=. Ranks that are started already are found.",
    ),
    **dict.fromkeys(("nccl", "gloo", "mpi_backend"), "That is a backend: see backend=."),
    **dict.fromkeys(("bf16", "fp16", "amp"), "That is a precision: see precision=."),
    **dict.fromkeys(
        ("local_sgd", "diloco", "powersgd", "bytegrad", "qadam", "decentralized"), "That is an algorithm: see comm=."
    ),
    "tpu": "Did you mean 'xla'?",
}

# What to say of a precision that is none here, and of a launcher.
PRECISION_HINTS = {
    **dict.fromkeys(("amp", "mixed", "16_32", "half"), "Write 'bf16', or 'fp16' on devices without bfloat16."),
    "tf32": "Write '32', with torch.set_float32_matmul_precision('high').",
    **dict.fromkeys(("64", "64_true", "fp64", "float64", "double"), "Write '32' with model.double(): types stay."),
    **dict.fromkeys(("16_true", "fp16_true"), "Write 'fp16', whose weights stay in float32, or 'bf16-true'."),
    **dict.fromkeys(("fp8", "int8", "8", "transformer_engine"), "Nothing here computes in 8 bits: write 'bf16'."),
}
LAUNCHER_HINTS = {
    **dict.fromkeys(
        (
            "torchrun",
            "srun",
            "mpi",
            "mpirun",
            "torch",
            "torch.distributed.launch",
            "accelerate",
            "deepspeed",
            "horovodrun",
        ),
        "Ranks that torchrun, srun or mpirun has started are found by themselves: leave launcher at 'auto'.",
    ),
    **dict.fromkeys(("mp", "multiprocessing", "mp.spawn", "popen"), "Did you mean 'spawn'?"),
    **dict.fromkeys(("subprocess", "subprocess_script"), "Did you mean 'script'?"),
    **dict.fromkeys(("notebook", "jupyter", "ipython"), "Did you mean 'forkserver'?"),
    **dict.fromkeys(("thread", "threads"), "Ranks are processes: did you mean 'fork'?"),
}

# What was here, or what people bring, and what is not here any more: by kind, each with what it was and what to write.
REMOVED: dict[str, dict[str, str]] = {
    "strategy": {
        "torchft": "it was torchft's steps, in which ranks could be lost while the others went on: write 'ddp' with "
        "max_restarts=1, save() and resume_from(), or 'hivemind' for peers that come and go.",
        "cp": f"it was context parallelism, a piece of each sequence on a rank: {_LONG_SEQUENCES}",
        "colossalai": "it was ColossalAI's Gemini in Lightning, whose package needs GPUs and a torch of 2024: write "
        "'fsdp', which divides the same, or 'fsdp(cpu_offload=True)'.",
        "ipu_strategy": "it was Graphcore's IPUs in Lightning, whose package poptorch has ended: write 'ddp' on an "
        "accelerator that torch has, or 'pipeline' for stages.",
    },
    "launcher": {
        "replicas": "it was that of max_lost=, which started a lost rank again while the others went on: leave it out, "
        "and write max_restarts=1, which starts all ranks again, with save() and resume_from()."
    },
    "algorithm": {},
    "function": {  # of `import distwrap`
        "resumable": "it was the loop of a rank that was lost and came back, under max_lost=: write `for epoch in "
        "range(start, epochs)` with the start from resume_from(), and max_restarts=1."
    },
    "option": {  # of @distributed, of its environment variables, and of strategies
        "max_lost": "It is not here: it let ranks be lost while the others went on. Instead write max_restarts=1, with "
        "save() and resume_from(), or strategy='hivemind' for peers that come and go.",
        "sequence_parallel": f"It is not here: norms computed with a piece of the sequence. Instead {_LONG_SEQUENCES}",
        "scale_lr": "It is not here: the learning rate is the loop's own. Instead write lr=0.01 * world_size().",
        "context_parallel": f"It is not here: it was a piece of each sequence on a rank. Instead {_LONG_SEQUENCES}",
    },
    "command": {
        "top": "it was a table of the ranks that run on this node. `distwrap where` prints the line in which each rank "
        "is; `py-spy top --pid PID`, htop and nvtop show what their processes do."
    },
}
