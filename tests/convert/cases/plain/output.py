import logging
import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

logger = logging.getLogger(__name__)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=int(os.environ["BATCH"]))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for i, (x,) in enumerate(tqdm(loader, desc=f"epoch {epoch}")):
            loss = (model(x) - 2).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if i % 2 == 0:
                logger.info("loss %f", loss.item())
        bar = tqdm(range(2))
        for number in bar:
            bar.set_postfix(number=number)
    torch.save(model.state_dict(), os.environ["OUT"])
    print("saved")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
