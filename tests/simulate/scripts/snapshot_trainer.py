"""A Trainer with a snapshot, as in torch's tutorials about torchrun; PLAIN=1 is the CPU of the reference."""

import os
import tempfile

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PLAIN = os.environ.get("PLAIN") == "1"


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.size = size
        self.data = [(torch.rand(20, dtype=torch.float64), torch.rand(1, dtype=torch.float64)) for _ in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index]


def ddp_setup():
    if not PLAIN:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    init_process_group(backend="gloo" if PLAIN else "nccl")


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.gpu_id = "cpu" if PLAIN else int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.model = model.to(self.gpu_id)
        self.train_data, self.optimizer, self.save_every = train_data, optimizer, save_every
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            self._load_snapshot(snapshot_path)
        self.model = DDP(self.model, device_ids=None if PLAIN else [self.gpu_id])

    def _load_snapshot(self, snapshot_path):
        loc = "cpu" if PLAIN else f"cuda:{self.gpu_id}"
        snapshot = torch.load(snapshot_path, map_location=loc)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        if self.global_rank == 0:
            print(f"RESULT resuming at epoch {self.epochs_run}")

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        b_sz = len(next(iter(self.train_data))[0])
        self.train_data.sampler.set_epoch(epoch)
        losses = [
            self._run_batch(source.to(self.gpu_id), targets.to(self.gpu_id)) for source, targets in self.train_data
        ]
        if self.global_rank == 0:
            print(f"RESULT [GPU{self.global_rank}] Epoch {epoch} | Batchsize: {b_sz} | {sum(losses) / len(losses):.8f}")

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.global_rank == 0 and epoch % self.save_every == 0:
                snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(snapshot, self.snapshot_path)
            torch.distributed.barrier()


def main(total_epochs, save_every, batch_size, snapshot_path):
    torch.manual_seed(0)
    dataset, model = MyTrainDataset(64), torch.nn.Linear(20, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(dataset, batch_size, pin_memory=True, shuffle=False, sampler=DistributedSampler(dataset))
    Trainer(model, loader, optimizer, save_every, snapshot_path).train(total_epochs)


if __name__ == "__main__":
    ddp_setup()
    folder = [tempfile.mkdtemp() if os.environ["RANK"] == "0" else None]
    torch.distributed.broadcast_object_list(folder)
    path = os.path.join(folder[0], "snapshot.pt")
    main(2, 1, 8, path)
    main(4, 10, 8, path)
    if os.environ["RANK"] == "0":
        os.remove(path)
        os.rmdir(folder[0])
    destroy_process_group()
