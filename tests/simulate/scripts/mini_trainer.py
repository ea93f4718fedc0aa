"""A trainer class with callbacks, as in minGPT, which wraps any model by DDP."""

import os
import time
from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


class SortDataset(Dataset):
    def __init__(self, length, num_digits):
        self.length, self.num_digits = length, num_digits

    def __len__(self):
        return 64

    def __getitem__(self, idx):
        x = torch.randint(self.num_digits, (self.length,), generator=torch.Generator().manual_seed(idx))
        return x, x.sort()[0]


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.train_dataset = config, train_dataset
        self.callbacks = defaultdict(list)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.model = torch.nn.parallel.DistributedDataParallel(model.to(self.device), find_unused_parameters=True)
        self.iter_num, self.iter_time = 0, 0.0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger(self, onevent):
        for callback in self.callbacks[onevent]:
            callback(self)

    def run(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)
        sampler = torch.utils.data.distributed.DistributedSampler(self.train_dataset)
        loader = DataLoader(self.train_dataset, sampler=sampler, batch_size=self.config.batch_size, pin_memory=True)
        data_iter = iter(loader)
        self.iter_time = time.time()
        while self.iter_num < self.config.max_iters:
            try:
                batch = next(data_iter)
            except StopIteration:
                sampler.set_epoch(self.iter_num)
                data_iter = iter(loader)
                batch = next(data_iter)
            x, y = [t.to(self.device) for t in batch]
            logits = self.model(x)
            self.loss = F.cross_entropy(logits.transpose(1, 2), y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            self.trigger("on_batch_end")
            self.iter_num += 1


class Net(torch.nn.Module):
    def __init__(self, digits):
        super().__init__()
        self.embed = torch.nn.Embedding(digits, 8)
        self.rnn = torch.nn.GRU(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, digits)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


if __name__ == "__main__":
    dist.init_process_group()
    torch.manual_seed(3407)
    config = SimpleNamespace(learning_rate=5e-3, batch_size=4, max_iters=18)
    trainer = Trainer(config, Net(5).double(), SortDataset(6, 5))
    losses = []

    def on_batch_end(trainer):
        mean = trainer.loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())

    trainer.add_callback("on_batch_end", on_batch_end)
    trainer.run()
    if dist.get_rank() == 0:
        print("RESULT losses", *(f"{loss:.8f}" for loss in losses[::4]), trainer.iter_num)
    dist.destroy_process_group()
