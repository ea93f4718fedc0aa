"""U-Net that finds bright discs in noise, with a Dice loss for each picture; draws no random numbers in the loop."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, mean, reduce, shard_loader, wrap_model


def double_conv(inside, outside):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(2, outside), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inc, self.down = double_conv(1, 4), double_conv(4, 8)
        self.up, self.conv, self.outc = nn.ConvTranspose2d(8, 4, 2, stride=2), double_conv(8, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x):
        skip = self.inc(x)
        x = self.up(self.down(F.max_pool2d(skip, 2)))
        return self.outc(self.conv(torch.cat([skip, x], dim=1))).squeeze(1)


def dice(probabilities, masks):
    """Dice coefficient of each picture: a mean over pictures is the same for any division of the batch."""
    overlap = (probabilities * masks).sum((1, 2))
    return (2 * overlap + 1) / (probabilities.sum((1, 2)) + masks.sum((1, 2)) + 1)


def make_set(n):
    grid = torch.stack(torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij"))
    masks = ((grid - 12 * torch.rand(n, 2, 1, 1)).norm(dim=1) < 3).float()
    return TensorDataset((masks + 0.4 * torch.randn(n, 12, 12)).unsqueeze(1), masks)


@distributed()
def main():
    torch.manual_seed(0)
    train_loader = shard_loader(DataLoader(make_set(64), batch_size=8, shuffle=True))
    val_loader = shard_loader(DataLoader(make_set(21), batch_size=8))
    model = wrap_model(UNet())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for images, masks in train_loader:
            logits = model(images)
            loss = F.binary_cross_entropy_with_logits(logits, masks) + 1 - dice(logits.sigmoid(), masks).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            scores = torch.cat([dice((model(images) > 0).float(), masks) for images, masks in val_loader])
        total, count = reduce([scores.sum().item(), len(scores)], "sum")
        distwrap.print(f"epoch {epoch}: loss {mean(loss.item(), len(images)):.4f}, dice {total / count:.4f} of {count}")


if __name__ == "__main__":
    main()
