import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import distwrap as dw

PAD, VOCAB = 0, 16


class TinyLM(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.mix = nn.Linear(2 * dim, dim)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, tokens):
        e = self.embed(tokens)
        past = F.pad(e, (0, 0, 1, 0))[:, :-1]
        return self.out(torch.tanh(self.mix(torch.cat([e, past], dim=-1))))


def corpus(n=96):
    g = torch.Generator().manual_seed(9)
    texts = []
    for length in torch.randint(3, 25, (n,), generator=g).tolist():
        start = torch.randint(1, VOCAB, (1,), generator=g)
        step = torch.randint(1, 4, (length,), generator=g).cumsum(0)
        texts.append((start + step) % (VOCAB - 1) + 1)
    return texts


def collate(batch):
    return pad_sequence(batch, batch_first=True, padding_value=PAD)


@dw.distributed(seed=0)
def main():
    loader = dw.shard_loader(DataLoader(corpus(), batch_size=8, collate_fn=collate), batch_size="global")
    model = dw.wrap_model(TinyLM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        nll, words = 0.0, 0
        for tokens in loader:
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            count = (targets != PAD).sum()
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
            dw.backward(dw.scale_loss(loss, count))
            dw.optimizer_step(optimizer)
            optimizer.zero_grad()
            nll, words = nll + loss.item(), words + count.item()
        nll, words = dw.reduce([nll, float(words)], "sum")
    return nll / words


if __name__ == "__main__":
    print(f"nll per token {main():.6f}")
