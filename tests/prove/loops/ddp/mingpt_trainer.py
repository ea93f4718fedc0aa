"""Character model with a Trainer class and configs as dataclasses; `torchrun mingpt_trainer.py`."""

import os
import tempfile
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


@dataclass
class GPTConfig:
    vocab_size: int = 11
    block_size: int = 10
    n_embd: int = 16


@dataclass
class TrainerConfig:
    max_epochs: int = 2
    batch_size: int = 8
    learning_rate: float = 1e-2
    grad_norm_clip: float = 0.5


class TinyGPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        self.mix, self.head = nn.Linear(2 * config.n_embd, config.n_embd), nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, idx, targets):
        x = self.tok_emb(idx) + self.pos_emb
        past = x.cumsum(1) / torch.arange(1, x.size(1) + 1, device=x.device)[:, None]
        logits = self.head(torch.relu(self.mix(torch.cat([x, past], dim=-1))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, config: TrainerConfig, model, train_set, test_set):
        self.config, self.global_rank = config, int(os.environ["RANK"])
        self.device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
        self.train_loader, self.test_loader = map(self._prepare_dataloader, (train_set, test_set))
        self.model = DDP(model.to(self.device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate)

    def _prepare_dataloader(self, dataset):
        return DataLoader(
            dataset, batch_size=self.config.batch_size, shuffle=False, sampler=DistributedSampler(dataset)
        )

    def _run_batch(self, source, targets, train: bool):
        with torch.set_grad_enabled(train):
            loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch: int, loader: DataLoader, train: bool):
        loader.sampler.set_epoch(epoch)
        mean = torch.stack([self._run_batch(x.to(self.device), y.to(self.device), train) for x, y in loader]).mean()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if self.global_rank == 0:
            print(f"epoch {epoch} | {'train' if train else 'eval'} loss {mean.item():.4f}")

    def train(self):
        for epoch in range(1, self.config.max_epochs + 1):
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.global_rank == 0:  # a snapshot, of which this example leaves nothing behind
                with tempfile.TemporaryFile() as file:
                    torch.save({"model": self.model.module.state_dict(), **asdict(self.config)}, file)
            self._run_epoch(epoch, self.test_loader, train=False)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(7)
    gpt_config, trainer_config = GPTConfig(), TrainerConfig()
    letters = (torch.randint(2, (202,)).cumsum(0) * 3) % gpt_config.vocab_size
    pieces = letters.unfold(0, gpt_config.block_size + 1, 1)  # overlapping pieces of one text
    splits = random_split(TensorDataset(pieces[:, :-1], pieces[:, 1:]), [128, 64])
    Trainer(trainer_config, TinyGPT(gpt_config), *splits).train()
    dist.destroy_process_group()
