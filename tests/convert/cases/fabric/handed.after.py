import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    backward,
    distributed,
    gather,
    is_rank_zero,
    load,
    print,
    save,
    seed_everything,
    shard_loader,
    wrap_model,
)


def step(batch, model, optimizer):
    optimizer.zero_grad()
    loss = (model(batch) - batch).square().mean()
    backward(loss)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()
    return loss.detach()


def fit(model, optimizer, loader):
    for epoch in range(2):
        for batch_number, (batch,) in enumerate(loader):
            loss = step(batch, model, optimizer)
        print(epoch, gather(loss).mean().item())


@distributed
def main():
    seed_everything(0)
    torch.set_default_dtype(torch.float64)
    loader = shard_loader(DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=int(os.environ["BATCH"])))
    model = torch.nn.Linear(2, 2)
    model, optimizer = wrap_model(model), torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "epochs": 1}
    fit(model, optimizer, loader)
    save(state, os.environ["OUT"] + ".state")
    loaded = load(os.environ["OUT"] + ".state", into=state)
    state.update({key: loaded[key] for key in state if not hasattr(state[key], "load_state_dict")})
    if is_rank_zero():
        save(model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
