"""Tags for the words of padded sentences, by an LSTM; draws no random numbers in the loop."""
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

import distwrap
from distwrap import distributed, reduce, scale_loss, shard_loader, wrap_model

WORDS, TAGS, IGNORE = 20, 3, -1


class LSTMTagger(nn.Module):
    def __init__(self, embedding_dim=8, hidden_dim=8):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, embedding_dim, padding_idx=0)
        self.lstm = nn.LSTM(embedding_dim, hidden_dim, batch_first=True, bidirectional=True)
        self.hidden2tag = nn.Linear(2 * hidden_dim, TAGS)

    def forward(self, sentences, lengths):
        packed = pack_padded_sequence(self.embedding(sentences), lengths.cpu(), batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.hidden2tag(hidden)


def make_sentences(n=64):
    for length in torch.randint(2, 9, (n,)).tolist():
        words = torch.randint(1, WORDS, (length,))
        yield words, (words + words.roll(-1)) % TAGS


def collate(batch):
    words, tags = zip(*batch)
    lengths = torch.tensor([len(sentence) for sentence in words])
    return pad_sequence(words, batch_first=True), lengths, pad_sequence(tags, batch_first=True, padding_value=IGNORE)


@distributed()
def main():
    torch.manual_seed(1)
    loader = shard_loader(DataLoader(list(make_sentences()), batch_size=8, shuffle=True, collate_fn=collate))
    model = wrap_model(LSTMTagger())
    loss_function = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(2):
        right = count = 0
        for words, lengths, tags in loader:
            tag_scores = model(words, lengths)
            loss = scale_loss(loss_function(tag_scores.flatten(0, 1), tags.flatten()), lengths.sum())
            model.zero_grad()
            loss.backward()
            optimizer.step()
            right += (tag_scores.argmax(2) == tags).sum().item()
            count += lengths.sum().item()
        right, count = reduce([right, count], "sum")
        distwrap.print(f"epoch {epoch}: {right} of {count} tags are right")


if __name__ == "__main__":
    main()
