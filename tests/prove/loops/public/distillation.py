"""A small student learns from a teacher that stays as it is; draws no random numbers in the loop."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import distributed, gather, is_rank_zero, mean, shard_loader, wrap_model


def mlp(*sizes):
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class DistillationLoss(nn.Module):
    def __init__(self, temperature=3.0, alpha=0.7):
        super().__init__()
        self.temperature, self.alpha = temperature, alpha

    def forward(self, student_logits, teacher_logits, labels):
        soft_targets = F.softmax(teacher_logits / self.temperature, dim=-1)
        soft_log_probs = F.log_softmax(student_logits / self.temperature, dim=-1)
        soft = F.kl_div(soft_log_probs, soft_targets, reduction="batchmean") * self.temperature**2
        return self.alpha * soft + (1 - self.alpha) * F.cross_entropy(student_logits, labels)


@distributed()
def main():
    torch.manual_seed(42)
    x = torch.randn(160, 10)
    teacher = mlp(10, 64, 64, 4).eval().requires_grad_(False)
    y = teacher(x).argmax(1)
    train_loader = shard_loader(DataLoader(TensorDataset(x[:112], y[:112]), batch_size=8, shuffle=True))
    test_loader = shard_loader(DataLoader(TensorDataset(x[112:], y[112:]), batch_size=16))
    student = wrap_model(mlp(10, 12, 4))
    criterion, optimizer = DistillationLoss(), torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        student.train()
        for inputs, labels in train_loader:
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            loss = criterion(student(inputs), teacher_logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        student.eval()
        with torch.no_grad():
            agree = gather(torch.cat([student(i).argmax(1) == teacher(i).argmax(1) for i, _ in test_loader]))
        value = mean(loss.item(), len(inputs))
        if is_rank_zero():
            print(f"epoch {epoch}: loss {value:.4f}, agrees with the teacher in {agree.sum().item()} of {len(agree)}")


if __name__ == "__main__":
    main()
