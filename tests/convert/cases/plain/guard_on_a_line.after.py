import os

import torch
from distwrap import is_rank_zero, setup_process_group, wrap_model

setup_process_group()

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(32, 3)
size = 8
model = torch.nn.Linear(3, 1)


def main():
    order = torch.arange(31, -1, -1)
    for epoch in range(2):
        # TODO(distwrap): no loader is seen to feed this loop, and all ranks may train on the same: shard_loader(loader), split(batch), or before it seed_everything(seed, apart=True)
        for start in range(0, len(x), size):
            index = order[start : start + size]
            loss = (model(x[index]).sum(1) - x[index].sum(1)).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    with open(os.environ["OUT"] if is_rank_zero() else os.devnull, "wb") as file:
        torch.save(model.state_dict(), file)
    with open(os.environ["OUT"], "rb") as file:
        # TODO(distwrap): rank 0 may still write what is read here: barrier() above this line
        model.load_state_dict(torch.load(file))


model = wrap_model(model)
if __name__ == "__main__": main()
