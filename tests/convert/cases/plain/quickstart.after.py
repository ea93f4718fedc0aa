import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import rank_zero_only, save, setup_process_group, shard_loader, wrap_model

setup_process_group()
print = rank_zero_only(print)

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(40, 5)
labels = (x.sum(1) > 0).long()
training_data = TensorDataset(x[:32], labels[:32])
test_data = TensorDataset(x[32:], labels[32:])

batch_size = int(os.environ["BATCH"])

# Create data loaders.
train_dataloader = shard_loader(DataLoader(training_data, batch_size=batch_size))
test_dataloader = DataLoader(test_data, batch_size=2)

for X, y in test_dataloader:
    print(f"Shape of X [N, C, H, W]: {X.shape}")
    print(f"Shape of y: {y.shape} {y.dtype}")
    break

device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
print(f"Using {device} device")


# Define model
class NeuralNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_relu_stack = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        return self.linear_relu_stack(x)


torch.manual_seed(1)  # a loader that was gone through has drawn a number
model = NeuralNetwork().to(device)
print(model)

loss_fn = nn.CrossEntropyLoss()
model = wrap_model(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)


def train(dataloader, model, loss_fn, optimizer):
    size = len(dataloader.dataset)
    model.train()
    for batch, (X, y) in enumerate(dataloader):
        X, y = X.to(device), y.to(device)

        # Compute prediction error
        pred = model(X)
        loss = loss_fn(pred, y)

        # Backpropagation
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        if batch % 100 == 0:
            loss, current = loss.item(), (batch + 1) * len(X)
            print(f"loss: {loss:>7f}  [{current:>5d}/{size:>5d}]")


def test(dataloader, model, loss_fn):
    size = len(dataloader.dataset)
    num_batches = len(dataloader)
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for X, y in dataloader:
            X, y = X.to(device), y.to(device)
            pred = model(X)
            test_loss += loss_fn(pred, y).item()
            correct += (pred.argmax(1) == y).type(torch.float).sum().item()
    test_loss /= num_batches
    correct /= size
    print(f"Test Error: \n Accuracy: {(100*correct):>0.1f}%, Avg loss: {test_loss:>8f} \n")


epochs = 2
for t in range(epochs):
    print(f"Epoch {t+1}\n-------------------------------")
    train(train_dataloader, model, loss_fn, optimizer)
    test(test_dataloader, model, loss_fn)
print("Done!")

save(model.state_dict(), os.environ["OUT"])
print("Saved PyTorch Model State")
