import argparse
import os
import shutil

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from distwrap import distributed, is_rank_zero, save, shard_loader, wrap_model


@distributed(seed=0)
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    if args.seed is not None:
        np.random.seed(args.seed)
    torch.manual_seed(0)
    x = torch.ones(32, 4, dtype=torch.float64)
    order = np.random.permutation(32).tolist()
    loader = shard_loader(DataLoader(Subset(TensorDataset(x, x[:, :1]), order), batch_size=int(os.environ["BATCH"])))
    model = nn.Linear(4, 1).double()
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    log = open(os.environ["OUT"] + ".log" if is_rank_zero() else os.devnull, "a")
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    log.write("done\n")
    log.close()
    save(model.state_dict(), os.environ["OUT"])
    if is_rank_zero(): shutil.copyfile(os.environ["OUT"], os.environ["OUT"] + ".copy")
    if is_rank_zero(): np.save(os.environ["OUT"] + ".npy", model.weight.detach().numpy())


if __name__ == "__main__":
    main()
