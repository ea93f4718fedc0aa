"""Parts of which small training programs are put together: a model, an optimizer, data, and what the loop does.

A `Program` trains with the same global batches on any number of ranks, in float64, so its weights and what it measures
must be those of one process.
"""

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import distwrap as dw

GLOBAL_BATCH, WIDTH, TOKENS, WORDS, EPOCHS = 12, 6, 5, 11, 2
Batch = dict[str, torch.Tensor]
Found = tuple[dict[str, torch.Tensor], list[float]]


@dataclass(frozen=True)
class Output:
    """What some models return, as those of Hugging Face do."""

    prediction: torch.Tensor
    hidden: torch.Tensor


# Models


class Base(nn.Module):
    """A model whose loss can be had by a method."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean squared error over the batch."""
        return (prediction_of(self(batch["x"], batch["tokens"])) - batch["y"]).pow(2).mean()


def prediction_of(output: Any) -> torch.Tensor:
    """Look through the container in which a model returns its prediction."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict):
        return output["prediction"]  # type: ignore[no-any-return]
    return output[0] if isinstance(output, tuple) else output.prediction  # type: ignore[no-any-return]


class Linear(Base):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Deep(Base):
    """Three layers with norms, which returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layers(x)
        return {"prediction": self.head(hidden), "hidden": hidden}


class Convolution(Base):
    """A convolution with groups, which returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * WIDTH, 1)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(self.layer(x.unsqueeze(1))).relu()
        return self.head(hidden.flatten(1)), hidden


class Words(Base):
    """Embeddings tied to the output's weights, and a recurrent layer; returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.scores = nn.Linear(WIDTH, WORDS, bias=False)
        self.scores.weight = self.embedding.weight
        self.head = nn.Linear(WORDS, 1)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> Output:
        hidden, _ = self.recurrent(self.embedding(tokens))
        return Output(self.head(self.scores(hidden[:, -1] + x).tanh()), hidden)


class Attention(Base):
    """A transformer's layer, recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8 + WIDTH, 1)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.layer, self.embedding(tokens), use_reentrant=False)
        return self.head(torch.cat([hidden.mean(1), x], 1))  # type: ignore[no-any-return]


class Frozen(Base):
    """A frozen body under a head that learns, and a weight of its own beside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh()).requires_grad_(False)
        self.head = nn.Linear(8, 1)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.gain  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], Base]] = {
    "linear": Linear,
    "deep": Deep,
    "convolution": Convolution,
    "words": Words,
    "attention": Attention,
    "frozen": Frozen,
}

# Optimizers, with the scheduler of each


def _optimizer(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: [kind([p for p in model.parameters() if p.requires_grad], **options)]


def _two_groups(model: nn.Module) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [torch.optim.AdamW([{"params": trained[:1], "lr": 0.02}, {"params": trained[1:]}], lr=0.01)]


def _two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [torch.optim.SGD(trained[:1], lr=0.05), torch.optim.Adam(trained[1:], lr=0.01)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "sgd": _optimizer(torch.optim.SGD, lr=0.03),
    "nesterov": _optimizer(torch.optim.SGD, lr=0.002, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": _optimizer(torch.optim.Adam, lr=0.01),
    "amsgrad": _optimizer(torch.optim.AdamW, lr=0.01, amsgrad=True, foreach=False),
    "rmsprop": _optimizer(torch.optim.RMSprop, lr=0.005, momentum=0.5, centered=True),
    "adagrad": _optimizer(torch.optim.Adagrad, lr=0.02, eps=1e-4),
    "nadam": _optimizer(torch.optim.NAdam, lr=0.01),
    "two groups": _two_groups,
    "two optimizers": _two_optimizers,
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any] | None] = {
    "none": None,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "warm-up": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5),
}

# Data


def sample(index: int) -> Batch:
    """One sample, which follows from its number."""
    generator = torch.Generator().manual_seed(1000 + index)
    x = torch.randn(WIDTH, dtype=torch.float64, generator=generator)
    tokens = torch.randint(WORDS, (TOKENS,), generator=generator)
    return {"x": x, "tokens": tokens, "y": (x.sum() + tokens.double().mean()).reshape(1), "index": torch.tensor(index)}


class Samples(Dataset[Batch]):
    """So many samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        return sample(index)


class Stream(IterableDataset[Batch]):
    """As many samples, one after the other."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Batch]:
        return map(sample, range(self.count))


def _batches() -> DataLoader[Batch]:
    return DataLoader(Samples(48), batch_sampler=BatchSampler(SequentialSampler(range(48)), GLOBAL_BATCH, False))


# Whole numbers of global batches, or a last one that is divided alike among 1, 2 and 3 ranks.
DATA: dict[str, Callable[[], DataLoader[Batch]]] = {
    "in order": lambda: DataLoader(Samples(48), batch_size=GLOBAL_BATCH),
    "shuffled": lambda: DataLoader(Samples(48), batch_size=GLOBAL_BATCH, shuffle=True),
    "short last batch": lambda: DataLoader(Samples(54), batch_size=GLOBAL_BATCH),
    "short last batch, shuffled": lambda: DataLoader(Samples(54), batch_size=GLOBAL_BATCH, shuffle=True),
    "left out": lambda: DataLoader(Samples(59), batch_size=GLOBAL_BATCH, shuffle=True, drop_last=True),
    "workers": lambda: DataLoader(Samples(48), batch_size=GLOBAL_BATCH, shuffle=True, num_workers=1),
}

# Loops: each yields after an optimizer's step


Step = Callable[[], None]


@dataclass
class Parts:
    """What a loop works with."""

    model: Any
    loader: Any
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]
    loss: Callable[[Batch], torch.Tensor]

    def step(self) -> None:
        """Step all, and begin anew."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.schedule()

    def schedule(self) -> None:
        """Step the schedulers."""
        for scheduler in self.schedulers:
            scheduler.step()


def plain(parts: Parts) -> None:
    for batch in parts.loader:
        parts.loss(batch).backward()
        parts.step()


def helpers(parts: Parts) -> None:
    for batch in parts.loader:
        dw.backward(parts.loss(batch))
        for optimizer in parts.optimizers:
            dw.optimizer_step(optimizer, max_norm=0.5)
            optimizer.zero_grad()
        parts.schedule()


def clipped(parts: Parts) -> None:
    for batch in parts.loader:
        parts.loss(batch).backward()
        nn.utils.clip_grad_norm_(parts.model.parameters(), 0.3)
        parts.step()


def accumulated(parts: Parts) -> None:
    for batch, window in dw.accumulate(parts.loader, 2, parts.model):
        (parts.loss(batch) / window.size).backward()
        if window.last:
            parts.step()


def counted(parts: Parts) -> None:
    for batch, window in dw.accumulate(parts.loader, 3, parts.model):
        count = len(batch["y"])
        dw.scale_loss(parts.loss(batch) * count, count).backward()
        if window.last:
            parts.step()


def in_lockstep(parts: Parts) -> None:
    for batch in dw.lockstep(parts.loader):
        parts.loss(batch).backward()
        parts.step()


def two_forwards(parts: Parts) -> None:
    for batch in parts.loader:
        noisy = {**batch, "x": batch["x"] + 0.1}
        (parts.loss(batch) + 0.5 * parts.loss(noisy)).backward()
        parts.step()


def two_backwards(parts: Parts) -> None:
    for batch in parts.loader:
        parts.loss(batch).backward()
        parts.loss({**batch, "x": -batch["x"]}).backward()
        parts.step()


def distilled(parts: Parts) -> None:
    teacher = copy.deepcopy(parts.model)
    for batch in parts.loader:
        with torch.no_grad():
            wanted = prediction_of(teacher(batch["x"] * 2, batch["tokens"]))
        found = prediction_of(parts.model(batch["x"], batch["tokens"]))
        (found - wanted).pow(2).mean().backward()
        parts.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), parts.model.parameters(), strict=True):
                old.lerp_(new, 0.1)


def with_a_closure(parts: Parts) -> None:
    for batch in parts.loader:
        for optimizer in parts.optimizers:

            def closure() -> torch.Tensor:
                for each in parts.optimizers:
                    each.zero_grad()
                loss = parts.loss(batch)  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
        parts.schedule()


LOOPS: dict[str, Callable[[Parts], None]] = {
    loop.__name__.replace("_", " "): loop
    for loop in (
        plain,
        helpers,
        clipped,
        accumulated,
        counted,
        in_lockstep,
        two_forwards,
        two_backwards,
        distilled,
        with_a_closure,
    )
}

BETWEEN = ("nothing", "evaluation", "checkpoint", "wrapped after the optimizer")
CALLS = ("forward", "method")


@dataclass(frozen=True)
class Program:
    """A training program: the names of its parts."""

    model: str
    optimizer: str
    scheduler: str
    data: str
    loop: str
    call: str
    between: str

    def __str__(self) -> str:
        return " | ".join(str(getattr(self, field.name)) for field in fields(self))

    def run(self, folder: Path) -> Found:
        """Train; return the weights and what was measured, the same on every rank.

        Args:
            folder: an empty one, the same on all ranks.
        """
        torch.manual_seed(4)
        net = MODELS[self.model]().double()
        late = self.between == "wrapped after the optimizer"
        model: Any = net if late else dw.wrap_model(net)
        optimizers = OPTIMIZERS[self.optimizer](model)
        model = dw.wrap_model(net) if late else model
        make = SCHEDULERS[self.scheduler]
        schedulers = [] if make is None else [make(optimizer) for optimizer in optimizers]
        loader = dw.shard_loader(DATA[self.data](), batch_size="global", seed=3)
        parts = Parts(model, loader, optimizers, schedulers, self._loss(model))
        measured: list[float] = []
        for epoch in range(EPOCHS):
            LOOPS[self.loop](parts)
            if self.between == "evaluation":
                measured.append(evaluate(model))
            elif self.between == "checkpoint" and epoch == 0:
                parts = self._resumed(parts, folder / "state.pt")
                model = parts.model
        return {name: value.clone() for name, value in model.state_dict().items()}, measured

    def _loss(self, model: Any) -> Callable[[Batch], torch.Tensor]:
        if self.call == "method":
            return model.loss  # type: ignore[no-any-return]
        return lambda batch: (prediction_of(model(batch["x"], batch["tokens"])) - batch["y"]).pow(2).mean()

    def _resumed(self, old: Parts, path: Path) -> Parts:
        """Save everything, and go on with new objects that load it."""
        state = {"model": old.model, "optimizers": old.optimizers, "schedulers": old.schedulers, "loader": old.loader}
        dw.save(state, path)
        model: Any = dw.wrap_model(MODELS[self.model]().double())
        optimizers = OPTIMIZERS[self.optimizer](model)
        make = SCHEDULERS[self.scheduler]
        schedulers = [] if make is None else [make(optimizer) for optimizer in optimizers]
        loader = dw.shard_loader(DATA[self.data](), batch_size="global", seed=3)
        new = {"model": model, "optimizers": optimizers, "schedulers": schedulers, "loader": loader}
        dw.load(path, into=new)
        return Parts(model, loader, optimizers, schedulers, self._loss(model))


def evaluate(model: Any) -> float:
    """Return the mean error over samples of which each rank takes its share, each once."""
    model.eval()
    total, count = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for batch in dw.shard_loader(DataLoader(Samples(31), batch_size=4), mode="exact"):
            errors = (prediction_of(model(batch["x"], batch["tokens"])) - batch["y"]).abs()
            total, count = total + errors.sum(), count + len(errors)
    model.train()
    return float(dw.mean(total / max(count, 1), count))


def chosen(count: int, seed: int = 0) -> list[Program]:
    """Choose programs so that each pair of parts comes up early, and then any."""
    every = [MODELS, OPTIMIZERS, SCHEDULERS, DATA, LOOPS, CALLS, BETWEEN]
    draw = random.Random(seed)
    candidates = [Program(*(draw.choice(list(names)) for names in every)) for _ in range(20 * count)]
    found: dict[Program, None] = {}
    seen: set[tuple[Any, ...]] = set()
    while candidates and len(found) < count:
        best = max(candidates[:400], key=lambda program: len(_pairs(program) - seen))
        candidates.remove(best)
        seen |= _pairs(best)
        found[best] = None
    return list(found)


def _pairs(program: Program) -> set[tuple[Any, ...]]:
    named = [(field.name, getattr(program, field.name)) for field in fields(program)]
    return set(itertools.combinations(named, 2))
