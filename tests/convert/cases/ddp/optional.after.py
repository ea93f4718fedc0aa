import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    device,
    distributed,
    rank,
    save,
    shard_loader,
    unwrap_model,
    world_size,
    wrap_model,
)


class Options:
    pass


@distributed
def main(args):
    args.distributed = world_size() > 0
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    # join the others
    print("""ranks
        and more""")
    data = TensorDataset(torch.randn(32, 2))
    loader = shard_loader(DataLoader(data, batch_size=int(os.environ["BATCH"]), shuffle=True))
    model = torch.nn.Linear(2, 2)
    if torch.cuda.is_available():
        model = wrap_model(model.to(device()))
    else:
        model = wrap_model(model)
    bare = unwrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(1, 3):
        loader.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
    if rank() == 0:
        save(bare.state_dict(), os.environ["OUT"], alone=True)


if __name__ == "__main__":
    main(Options())
