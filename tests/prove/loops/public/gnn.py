"""Graph network over batches of small graphs, put together by a collate_fn; draws no random numbers in the loop."""
import torch
from torch import nn
from torch.utils.data import DataLoader

import distwrap
from distwrap import distributed, gather, shard_loader, wrap_model


def rings(n=96):
    """Rings and paths of several lengths: which of the two is it?"""
    for size, label in zip(torch.randint(4, 9, (n,)).tolist(), torch.arange(n) % 2):
        forth = torch.arange(size - 1 + int(label))
        edges = torch.stack([forth, (forth + 1) % size])
        yield 0.1 * torch.randn(size, 3), torch.cat([edges, edges.flip(0)], dim=1), label


def collate(graphs):
    features, edges, labels = zip(*graphs)
    sizes = torch.tensor([len(x) for x in features])
    offsets = sizes.cumsum(0) - sizes
    joint = torch.cat([e + offset for e, offset in zip(edges, offsets)], dim=1)
    return torch.cat(features), joint, torch.arange(len(graphs)).repeat_interleave(sizes), torch.stack(labels)


class GIN(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, hidden), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, 2)

    def forward(self, x, edges, graph, graphs):
        source, target = edges
        x = torch.cat([x, torch.bincount(target, minlength=len(x)).unsqueeze(1)], dim=1)
        for layer in (self.first, self.second):
            x = layer(x + torch.zeros_like(x).index_add(0, target, x[source]))
        return self.head(torch.zeros(graphs, x.size(1), device=x.device).index_add(0, graph, x))


@distributed()
def main():
    torch.manual_seed(12)
    loader = shard_loader(DataLoader(list(rings()), batch_size=8, shuffle=True, collate_fn=collate))
    model = wrap_model(GIN())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for epoch in range(2):
        hits = []
        for x, edges, graph, y in loader:
            out = model(x, edges, graph, len(y))
            loss = nn.functional.cross_entropy(out, y)  # a mean over graphs, of which all ranks have equally many
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits.append(out.argmax(1) == y)
        distwrap.print(f"epoch {epoch}: accuracy {gather(torch.cat(hits)).float().mean().item():.4f}")


if __name__ == "__main__":
    main()
