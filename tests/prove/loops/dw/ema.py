import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw


def tensors(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 5, generator=g)
    return TensorDataset(x, x.prod(1, keepdim=True).sqrt())


@torch.no_grad()
def test_loss(model, loader):
    model.eval()
    errors = [(model(x) - y).square() for x, y in loader]
    return dw.gather(torch.cat(errors)).mean().item()


@dw.distributed(seed=4)
def main():
    train = dw.shard_loader(DataLoader(tensors(192, 0), batch_size=32), batch_size="global")
    test = dw.shard_loader(DataLoader(tensors(50, 1), batch_size=25), mode="exact")
    model = dw.wrap_model(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    for epoch in range(2):
        model.train()
        for x, y in train:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
        dw.print(f"epoch {epoch}: {test_loss(model, test):.6f}, averaged {test_loss(ema, test):.6f}")
    return test_loss(ema, test)


if __name__ == "__main__":
    print(f"test loss of the average: {main():.7f}")
