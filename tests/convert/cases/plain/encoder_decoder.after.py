import itertools
import os

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, save, shard_loader, wrap_model


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    encoder = nn.Linear(3, 4)
    decoder = nn.Linear(4, 3)
    teacher = nn.Linear(3, 3)
    params = itertools.chain(encoder.parameters(), decoder.parameters())
    encoder = wrap_model(encoder)
    decoder = wrap_model(decoder)
    optimizer = optim.Adam(params, lr=0.01)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    loader = shard_loader(DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=int(os.environ["BATCH"])))
    for epoch in range(2):
        for (x,) in loader:
            with torch.no_grad():
                target = teacher(x)
            loss = (decoder(encoder(x).tanh()) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(itertools.chain(encoder.parameters(), decoder.parameters()), 0.5)
            optimizer.step()
            scheduler.step()
    save({"encoder": encoder.state_dict(), "decoder": decoder.state_dict()}, os.environ["OUT"])


if __name__ == "__main__":
    main()
