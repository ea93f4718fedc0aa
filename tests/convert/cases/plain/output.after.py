import logging
import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from distwrap import (
    distributed,
    is_rank_zero,
    progress,
    rank_zero_only,
    save,
    shard_loader,
    wrap_model,
)

print = rank_zero_only(print)

logger = logging.getLogger(__name__)


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    loader = shard_loader(DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=int(os.environ["BATCH"])))
    model = torch.nn.Linear(3, 1)
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for i, (x,) in enumerate(progress(loader, desc=f"epoch {epoch}")):
            loss = (model(x) - 2).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if i % 2 == 0:
                if is_rank_zero(): logger.info("loss %f", loss.item())
        bar = tqdm(range(2), disable=not is_rank_zero())
        for number in bar:
            bar.set_postfix(number=number)
    save(model.state_dict(), os.environ["OUT"])
    print("saved")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
