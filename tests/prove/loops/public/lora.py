"""LoRA adapters by hand on a model that is frozen; draws no random numbers in the loop."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import accumulate, distributed, gather, shard_loader, wrap_model


class LoRALinear(nn.Module):
    def __init__(self, linear, r=2, alpha=4):
        super().__init__()
        self.linear, self.scaling = linear, alpha / r
        self.lora_A = nn.Parameter(torch.randn(r, linear.in_features) / linear.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, r))

    def forward(self, x):
        return self.linear(x) + self.scaling * F.linear(F.linear(x, self.lora_A), self.lora_B)


def inject_lora(model):
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LoRALinear(module))
    return model


class Classifier(nn.Module):
    def __init__(self, words=30, dim=16):
        super().__init__()
        self.embed, self.layers = nn.Embedding(words, dim), nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 3))

    def forward(self, tokens):
        return self.layers(self.embed(tokens).mean(1))


@distributed()
def main():
    torch.manual_seed(8)
    tokens = torch.randint(30, (128, 6))
    data = TensorDataset(tokens, tokens[:, :2].sum(1) // 20)
    loader = shard_loader(DataLoader(data, batch_size=4, shuffle=True))
    model = wrap_model(inject_lora(Classifier()))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.0)
    hits = []
    for (inputs, labels), window in accumulate(loader, 4, model):
        logits = model(inputs)
        (F.cross_entropy(logits, labels) / window.size).backward()
        hits.append(logits.argmax(1) == labels)
        if window.last:
            optimizer.step()
            optimizer.zero_grad()
    distwrap.print(f"accuracy {gather(torch.cat(hits)).float().mean().item():.4f}")


if __name__ == "__main__":
    main()
