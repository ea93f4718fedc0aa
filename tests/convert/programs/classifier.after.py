"""A picture classifier as one finds it in many repositories: plateau scheduler, early stop, progress bar and log."""

import argparse
import logging
import os
import random
import time

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, random_split
from tqdm import tqdm
from distwrap import distributed, is_rank_zero, progress, shard_loader, wrap_model

logging.basicConfig(level=logging.INFO, format='%(asctime)s %(levelname)s %(message)s')
logger = logging.getLogger(__name__)


def get_args():
    parser = argparse.ArgumentParser(description='Train an image classifier')
    parser.add_argument('--batch-size', type=int, default=16)
    parser.add_argument('--epochs', type=int, default=6)
    parser.add_argument('--lr', type=float, default=0.05)
    parser.add_argument('--patience', type=int, default=2, help='epochs without improvement before stopping')
    parser.add_argument('--val-fraction', type=float, default=0.25)
    parser.add_argument('--num-workers', type=int, default=0)
    parser.add_argument('--seed', type=int, default=42)
    parser.add_argument('--output-dir', type=str, default='checkpoints')
    parser.add_argument('--resume', type=str, default=None, help='checkpoint to resume from')
    return parser.parse_args()


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


class Textures(Dataset):
    """Striped pictures of three classes: across, along and checked."""

    def __init__(self, size=80):
        rng = np.random.default_rng(0)
        self.labels = rng.integers(0, 3, size)
        line = np.arange(8) % 2
        kinds = np.stack([np.tile(line, (8, 1)), np.tile(line, (8, 1)).T, (line[:, None] + line[None]) % 2])
        self.images = kinds[self.labels] + rng.normal(0, 0.5, (size, 8, 8))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        image = torch.as_tensor(self.images[idx], dtype=torch.float32).unsqueeze(0)
        return image, torch.tensor(self.labels[idx], dtype=torch.long)


class SmallCNN(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class EarlyStopping:
    def __init__(self, patience):
        self.patience = patience
        self.best = float('inf')
        self.counter = 0

    def step(self, value):
        if value < self.best:
            self.best = value
            self.counter = 0
            return True
        self.counter += 1
        return False

    @property
    def should_stop(self):
        return self.counter >= self.patience


def train_one_epoch(model, loader, criterion, optimizer, device, epoch):
    model.train()
    running_loss, correct, total = 0.0, 0, 0
    pbar = tqdm(loader, desc=f'Epoch {epoch}', disable=not is_rank_zero())
    for images, labels in pbar:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()

        running_loss += loss.item() * images.size(0)
        _, predicted = outputs.max(1)
        correct += (predicted == labels).sum().item()
        total += labels.size(0)
        pbar.set_postfix(loss=running_loss / total, acc=correct / total)
    return running_loss / total, correct / total


@torch.no_grad()
def validate(model, loader, criterion, device):
    model.eval()
    running_loss, correct, total = 0.0, 0, 0
    for images, labels in progress(loader, desc='Validating', leave=False):
        images, labels = images.to(device), labels.to(device)
        outputs = model(images)
        loss = criterion(outputs, labels)
        running_loss += loss.item() * images.size(0)
        correct += (outputs.argmax(1) == labels).sum().item()
        total += labels.size(0)
    return running_loss / total, correct / total


@distributed
def main():
    args = get_args()
    set_seed(args.seed)
    os.makedirs(args.output_dir, exist_ok=True)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    if is_rank_zero(): logger.info('Using device: %s', device)

    dataset = Textures()
    n_val = int(len(dataset) * args.val_fraction)
    train_set, val_set = random_split(dataset, [len(dataset) - n_val, n_val])
    train_loader = shard_loader(DataLoader(train_set, batch_size=args.batch_size, shuffle=True,
                              num_workers=args.num_workers, pin_memory=torch.cuda.is_available()))
    val_loader = DataLoader(val_set, batch_size=args.batch_size, shuffle=False, num_workers=args.num_workers)
    if is_rank_zero(): logger.info('Train samples: %d, validation samples: %d', len(train_set), len(val_set))

    model = SmallCNN().to(device)
    if is_rank_zero(): logger.info('Parameters: %d', sum(p.numel() for p in model.parameters() if p.requires_grad))
    criterion = nn.CrossEntropyLoss()
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = ReduceLROnPlateau(optimizer, mode='min', factor=0.5, patience=1)
    stopper = EarlyStopping(args.patience)

    start_epoch, best_acc = 0, 0.0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint['model'])
        optimizer.load_state_dict(checkpoint['optimizer'])
        scheduler.load_state_dict(checkpoint['scheduler'])
        start_epoch = checkpoint['epoch'] + 1
        best_acc = checkpoint['best_acc']
        if is_rank_zero(): logger.info('Resumed from epoch %d', start_epoch)

    for epoch in range(start_epoch, args.epochs):
        start = time.time()
        train_loss, train_acc = train_one_epoch(model, train_loader, criterion, optimizer, device, epoch)
        val_loss, val_acc = validate(model, val_loader, criterion, device)
        scheduler.step(val_loss)
        if is_rank_zero(): logger.info('Epoch %d: train loss %.6f acc %.4f | val loss %.6f acc %.4f | lr %.2e | %.1fs', epoch,
                    train_loss, train_acc, val_loss, val_acc, optimizer.param_groups[0]['lr'], time.time() - start)

        improved = stopper.step(val_loss)
        best_acc = max(best_acc, val_acc)
        state = {
            'epoch': epoch,
            'model': model.state_dict(),
            'optimizer': optimizer.state_dict(),
            'scheduler': scheduler.state_dict(),
            'best_acc': best_acc,
        }
        if is_rank_zero(): torch.save(state, os.path.join(args.output_dir, 'last.pt'))
        if improved:
            if is_rank_zero(): torch.save(state, os.path.join(args.output_dir, 'best.pt'))
        if stopper.should_stop:
            if is_rank_zero(): logger.info('Early stopping at epoch %d', epoch)
            break

    if is_rank_zero(): logger.info('Best validation accuracy: %.4f', best_acc)


if __name__ == '__main__':
    main()
