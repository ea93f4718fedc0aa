import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, save, shard_loader, wrap_model


@distributed
def main():
    torch.manual_seed(0)
    x = torch.randn(32, 3, dtype=torch.float64)
    y = (x[:, :1] * x[:, 1:2]).sin() * 3
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    model = wrap_model(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    losses = []
    for inputs, targets in shard_loader(DataLoader(TensorDataset(x, y), batch_size=int(os.environ["BATCH"]))):

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        # TODO(distwrap): LBFGS decides by the closure's loss how far it steps, and ranks would step apart: return mean(loss) in it
        losses.append(optimizer.step(closure).item())
    save({"model": model.state_dict(), "losses": {"all": torch.tensor(losses)}}, os.environ["OUT"])


if __name__ == "__main__":
    main()
