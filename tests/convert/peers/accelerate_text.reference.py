"""The training of accelerate_text.py in plain torch, in one process."""

import sys
import types
from pathlib import Path

import torch
from torch.utils.data import DataLoader

# What the program defines, without the packages that it needs to train.
text = Path(__file__).with_name("accelerate_text.py").read_text().partition("def get_dataloaders")[0]
lines = [line for line in text.splitlines() if "accelerate" not in line and not line.startswith("logger")]
program = types.ModuleType("program")
exec("\n".join(lines), program.__dict__)

batch_size, every = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(42)
torch.set_default_dtype(torch.float64)
train_data = program.Sentences(64, seed=0)
loader = DataLoader(train_data, batch_size, collate_fn=program.collate_fn, drop_last=True)
model = program.TextClassifier(len(train_data.words))
others, free = [], []
for name, parameter in model.named_parameters():
    (free if "bias" in name or "norm" in name else others).append(parameter)
optimizer = torch.optim.AdamW(
    [{"params": others, "weight_decay": 0.01}, {"params": free, "weight_decay": 0.0}], lr=2e-2
)
schedule = program.get_linear_schedule_with_warmup(optimizer, 2, 3 * -(-len(loader) // every))
for epoch in range(3):
    for step, batch in enumerate(loader, 1):
        (model(**batch).loss / every).backward()
        if step % every == 0 or step == len(loader):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
Path("results").mkdir()
torch.save(model.state_dict(), "results/pytorch_model.bin")
