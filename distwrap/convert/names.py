"""Full names of other libraries' functions and classes that scripts use, and bare names of methods."""

# Data

LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
SAMPLER = ("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler")

# Ranks

WRAPPER = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
DATA_PARALLEL = (
    "torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "torch.nn.parallel.data_parallel.DataParallel",
)  # fmt: skip
INIT = ("torch.distributed.init_process_group",)
SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn")
PROCESSES = ("torch.multiprocessing.Process", "multiprocessing.Process", "multiprocessing.context.Process")
# Functions that return another value on each rank.
RANKS = ("distwrap.rank", "distwrap.is_rank_zero", "torch.distributed.get_rank")
COLLECTIVES = {
    *(f"distwrap.{name}" for name in ("gather", "gather_object", "reduce", "mean", "broadcast", "barrier", "agree")),
    "distwrap.assert_in_sync", "distwrap.sync_buffers",
    *(
        f"torch.distributed.{name}"
        for name in (
            "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "reduce", "broadcast", "barrier",
            "gather", "scatter", "broadcast_object_list", "reduce_scatter", "all_to_all",
        )
    ),
}  # fmt: skip

# Models and precision

# Methods that return their own model or tensor, moved or changed.
MOVES = ("to", "cuda", "cpu", "train", "eval", "double", "float", "half", "bfloat16", "requires_grad_", "apply", "type")
# Functions that read a model itself.
TRACERS = ("torch.jit.trace", "torch.jit.script", "torch.onnx.export", "torch.fx.symbolic_trace")
DEVICE = "torch.device"
ACCELERATORS = ("cuda", "mps", "xpu", "npu")
AUTOCAST = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast")
SCALER = (
    "torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "torch.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler",
)  # fmt: skip

# Random numbers

# Functions that seed the draws on the CPU, as those of data.
CPU_SEEDS = ("torch.manual_seed", "torch.random.manual_seed", "numpy.random.seed", "random.seed")
SEEDS = (*CPU_SEEDS, "torch.cuda.manual_seed_all")
# Common names of functions that seed everything.
SEED_FUNCTIONS = (
    "seed_everything", "set_seed", "setup_seed", "set_random_seed", "init_seeds", "fix_seed", "seed_all",
)  # fmt: skip
# Functions that draw from the generators of the whole process.
DRAWS = {
    f"{library}{name}"
    for library, names in {
        "torch.": (
            "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "rand_like",
            "randn_like", "randint_like",
        ),
        "random.": (
            "random", "randint", "randrange", "choice", "choices", "sample", "shuffle", "uniform", "gauss",
        ),
        "numpy.random.": (
            "rand", "randn", "randint", "random", "choice", "permutation", "shuffle", "uniform", "normal", "beta",
        ),
    }.items()
    for name in names
}  # fmt: skip
DRAWS_IN_PLACE = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_")
# Draws that make, order or divide whole data sets: with different seeds, ranks train on what others evaluate. Single
# numbers, as of `random.random`, are left out.
DRAWS_OF_DATA = (
    "torch.utils.data.random_split", "torch.randperm", "torch.randn", "torch.rand", "torch.randint",
    "numpy.random.permutation", "numpy.random.randn", "numpy.random.rand", "numpy.random.shuffle", "random.shuffle",
    "random.sample", "numpy.random.choice", "sklearn.model_selection.train_test_split",
)  # fmt: skip
CLOCKS_AND_DRAWS = ("time.", "datetime.", "random.", "numpy.random.", "torch.rand")  # prefixes
AUGMENTING = ("torchvision.transforms", "albumentations", "kornia.augmentation")  # prefixes

# Output

BARS = ("tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.notebook.tqdm", "tqdm.std.tqdm")
RANGES = ("tqdm.trange", "tqdm.auto.trange")
WRITERS = (
    "torch.utils.tensorboard.SummaryWriter", "torch.utils.tensorboard.writer.SummaryWriter",
    "tensorboardX.SummaryWriter", "wandb.init",
)  # fmt: skip
RECORDS = ("wandb.log", "wandb.finish", "wandb.watch", "mlflow.log_metric", "mlflow.log_metrics", "mlflow.log_params")

# Files

WRITES = (
    "numpy.save", "numpy.savez", "numpy.savetxt", "matplotlib.pyplot.savefig", "torchvision.utils.save_image",
    "shutil.copyfile", "shutil.copy", "shutil.copy2", "shutil.move", "shutil.rmtree", "os.remove", "os.unlink",
    "os.rename", "os.mkdir",
)  # fmt: skip
WRITE_METHODS = ("to_csv", "savefig", "write_text", "save_pretrained")
