import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    train_loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=int(os.environ["BATCH"]))
    test_loader = DataLoader(TensorDataset(x[:9], x[:9, :1]), batch_size=4)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for epoch in range(2):
        model.train()
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        errors = []
        for x, y in test_loader:
            with torch.no_grad():
                errors.append(accelerator.gather_for_metrics((model(x) - y).abs()))
        accelerator.print(f"epoch {epoch}: {torch.cat(errors).mean():.6f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print(accelerator.num_processes, "processes on", accelerator.device)
    accelerator.save(accelerator.unwrap_model(model).state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
