"""A distributed checkpoint of an FSDP model, loaded into another one."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class AppState(dcp.stateful.Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    fully_shard(model)
    return AppState(model, torch.optim.Adam(model.parameters(), lr=0.02))


def train(app, steps):
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(100 * app.step + dist.get_rank())
        loss = app.model(torch.randn(3, 4, generator=generator, dtype=torch.float64)).square().mean()
        loss.backward()
        app.optimizer.step()
        app.optimizer.zero_grad()
        app.step += 1
        losses.append(loss.detach())
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    return total.item()


dist.init_process_group("gloo")
where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(where, src=0)
folder = Path(where[0])
app = make(0)
before = train(app, 3)
dcp.save({"app": app}, checkpoint_id=folder / "step3")
dist.barrier()
files = sorted(os.listdir(folder / "step3"))
after = train(app, 3)
other = make(1)
dcp.load({"app": other}, checkpoint_id=folder / "step3")
step = other.step
again = train(other, 3)
dist.barrier()
if dist.get_rank() == 0:
    print("RESULT files", len(files), *(name.rpartition(".")[2] for name in files))
    print(f"RESULT losses {before:.8f} {after:.8f} {again:.8f} from {step}")
    shutil.rmtree(folder)
dist.destroy_process_group()
