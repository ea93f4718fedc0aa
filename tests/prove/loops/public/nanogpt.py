"""nanoGPT on one row of tokens, accumulated; draws no random numbers in the loop."""
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import accumulate, backward, distributed, mean, optimizer_step, shard_loader, wrap_model

block_size, vocab_size, n_embd, n_head, learning_rate, warmup = 12, 17, 16, 2, 3e-3, 2


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.ln, self.c_attn, self.c_proj = nn.LayerNorm(n_embd), nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.LayerNorm(n_embd), nn.Linear(n_embd, 32), nn.GELU(), nn.Linear(32, n_embd))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        B, T = idx.shape
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))
        q, k, v = (t.view(B, T, n_head, -1).transpose(1, 2) for t in self.c_attn(self.ln(x)).split(n_embd, dim=2))
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1))
        return F.cross_entropy(self.lm_head(x + self.mlp(x)).flatten(0, 1), targets.flatten())


@distributed()
def main():
    torch.manual_seed(1337)
    tokens = (torch.arange(128 * block_size + 1).square() + torch.randint(3, (128 * block_size + 1,))) % vocab_size
    data = TensorDataset(tokens[:-1].view(-1, block_size), tokens[1:].view(-1, block_size))
    loader = shard_loader(DataLoader(data, batch_size=8, shuffle=True))
    model = wrap_model(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    steps = len(loader) // 2
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda it: (it + 1) / warmup if it < warmup else 0.55 + 0.45 * math.cos(math.pi * it / steps)
    )
    for (x, y), window in accumulate(loader, 2, model):
        loss = model(x, y)
        backward(loss / window.size)
        if window.last:
            optimizer_step(optimizer, max_norm=1.0, scheduler=schedule)
            optimizer.zero_grad(set_to_none=True)
            distwrap.print(f"loss {mean(loss.item(), len(x)):.4f}")


if __name__ == "__main__":
    main()
