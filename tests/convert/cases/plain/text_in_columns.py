import os

import torch
from torch import nn

bptt = 4


def batchify(data, columns):
    rows = data.size(0) // columns
    return data[: rows * columns].view(columns, -1).t().contiguous()


def get_batch(source, i):
    length = min(bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.rnn = nn.GRU(4, 4)
        self.out = nn.Linear(4, 5)

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.words(x), hidden)
        return self.out(out).view(-1, 5), hidden


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    text = torch.arange(160) ** 2 % 7 % 5
    batch_size = int(os.environ["BATCH"])
    train_data = batchify(text, batch_size)
    model = Net()
    for epoch in range(2):
        hidden = torch.zeros(1, batch_size, 4)
        for number, i in enumerate(range(0, train_data.size(0) - 1, bptt)):
            x, y = get_batch(train_data, i)
            model.zero_grad()
            out, hidden = model(x, hidden.detach())
            nn.functional.cross_entropy(out, y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-1.0)
    torch.save(model.state_dict(), os.environ["OUT"])


main()
