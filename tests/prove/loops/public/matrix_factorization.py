"""Matrix factorization with biases for recommendations; draws no random numbers in the loop."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import distwrap
from distwrap import distributed, reduce, shard_loader, wrap_model


class MatrixFactorization(nn.Module):
    def __init__(self, n_users, n_items, n_factors=6, mean=0.0):
        super().__init__()
        self.user_factors, self.item_factors = nn.Embedding(n_users, n_factors), nn.Embedding(n_items, n_factors)
        self.user_biases, self.item_biases = nn.Embedding(n_users, 1), nn.Embedding(n_items, 1)
        for factors in (self.user_factors, self.item_factors):
            nn.init.normal_(factors.weight, std=0.1)
        for biases in (self.user_biases, self.item_biases):
            nn.init.zeros_(biases.weight)
        self.mean = mean

    def forward(self, user, item):
        bias = self.user_biases(user) + self.item_biases(item)
        return self.mean + bias.squeeze(1) + (self.user_factors(user) * self.item_factors(item)).sum(dim=1)


def make_ratings(n=224, users=20, items=15):
    user, item = torch.randint(users, (n,)), torch.randint(items, (n,))
    taste = torch.randn(users, 2) @ torch.randn(2, items)
    return TensorDataset(user, item, 3 + taste[user, item] + 0.1 * torch.randn(n))


@distributed()
def main():
    torch.manual_seed(10)
    train, test = random_split(make_ratings(), [192, 32])
    train_loader = shard_loader(DataLoader(train, batch_size=16, shuffle=True), batch_size="global")
    test_loader = shard_loader(DataLoader(test, batch_size=16))
    model = wrap_model(MatrixFactorization(20, 15, mean=3.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03, weight_decay=1e-4)
    for epoch in range(1):
        for user, item, rating in train_loader:
            loss = nn.functional.mse_loss(model(user, item), rating)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            errors = torch.cat([(model(user, item) - rating).square() for user, item, rating in test_loader])
        squared, count = reduce([errors.sum().item(), len(errors)], "sum")
        distwrap.print(f"epoch {epoch}: RMSE {(squared / count) ** 0.5:.4f} of {count} ratings")


if __name__ == "__main__":
    main()
