"""Skip-gram with negative sampling; draws random numbers itself: torch.multinomial for the negatives."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, reduce, shard_loader, wrap_model

VOCABULARY, DIM, WINDOW, NEGATIVES = 20, 8, 1, 4


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.center, self.context = nn.Embedding(VOCABULARY, DIM), nn.Embedding(VOCABULARY, DIM)
        nn.init.uniform_(self.center.weight, -0.5 / DIM, 0.5 / DIM)
        nn.init.zeros_(self.context.weight)

    def forward(self, center, context, negatives):
        v = self.center(center)
        positive = F.logsigmoid((v * self.context(context)).sum(1))
        negative = F.logsigmoid(-torch.bmm(self.context(negatives), v.unsqueeze(2)).squeeze(2)).sum(1)
        return -(positive + negative).mean()


def skip_grams(words):
    return [
        (words[i], words[j])
        for i in range(len(words))
        for j in range(max(0, i - WINDOW), min(len(words), i + WINDOW + 1))
        if i != j
    ]


@distributed()
def main():
    torch.manual_seed(2)
    words = (torch.randint(3, (97,)).cumsum(0) % VOCABULARY).tolist()
    pairs = torch.tensor(skip_grams(words))
    loader = shard_loader(DataLoader(TensorDataset(*pairs.unbind(1)), batch_size=12, shuffle=True))
    frequency = torch.bincount(torch.tensor(words), minlength=VOCABULARY).float() ** 0.75
    model = wrap_model(SkipGram())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    for epoch in range(2):
        total, batches = 0.0, 0
        for center, context in loader:
            negatives = torch.multinomial(frequency, len(center) * NEGATIVES, replacement=True)
            loss = model(center, context, negatives.view(len(center), NEGATIVES))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, batches = total + loss.item(), batches + 1
        total, batches = reduce([total, batches], "sum")
        distwrap.print(f"epoch {epoch}: loss {total / batches:.4f}")


if __name__ == "__main__":
    main()
