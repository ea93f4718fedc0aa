"""Transformer that translates a row of words into its reverse, padded; draws no random numbers in the loop."""
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import distwrap
from distwrap import backward, distributed, optimizer_step, reduce, scale_loss, shard_loader, wrap_model

PAD, BOS, WORDS, D = 0, 1, 14, 16


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D, padding_idx=PAD), nn.Embedding(10, D)
        self.transformer = nn.Transformer(D, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(D, WORDS)

    def embed(self, tokens):
        return self.words(tokens) * D**0.5 + self.places(torch.arange(tokens.size(1), device=tokens.device))

    def forward(self, src, tgt):
        causal, padded = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool, device=tgt.device).triu(1), src == PAD
        masks = {"tgt_mask": causal, "src_key_padding_mask": padded, "memory_key_padding_mask": padded}
        return self.generator(self.transformer(self.embed(src), self.embed(tgt), **masks))


def sentences(n):
    for length in torch.randint(3, 9, (n,)).tolist():
        words = torch.randint(2, WORDS, (length,))
        yield words, torch.cat([torch.tensor([BOS]), words.flip(0)])


def collate(pairs):
    return [pad_sequence(side, batch_first=True, padding_value=PAD) for side in zip(*pairs)]


@distributed()
def main():
    torch.manual_seed(0)
    loader = shard_loader(DataLoader(list(sentences(96)), batch_size=8, shuffle=True, collate_fn=collate))
    model = wrap_model(Seq2Seq())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.9, 0.98), eps=1e-9)
    noam = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) ** -0.5, (step + 1) * 4**-1.5))
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum")
    totals = [0.0, 0]
    for src, tgt in loader:
        logits, tokens = model(src, tgt[:, :-1]), (tgt[:, 1:] != PAD).sum().item()
        loss_sum = criterion(logits.flatten(0, 1), tgt[:, 1:].flatten())
        optimizer.zero_grad()
        backward(scale_loss(loss_sum, tokens))  # the mean over the words of all ranks
        optimizer_step(optimizer, max_norm=1.0, scheduler=noam)
        totals = [totals[0] + loss_sum.item(), totals[1] + tokens]
    loss, count = reduce(totals, "sum")
    distwrap.print(f"loss {loss / count:.4f} of {count} words")


if __name__ == "__main__":
    main()
