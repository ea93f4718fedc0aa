import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import save, setup_process_group, shard_loader, wrap_model

setup_process_group()

# tabs, and lines that end as on Windows
torch.set_default_dtype(torch.float64); torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
model = wrap_model(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = shard_loader(DataLoader(TensorDataset(torch.randn(32, 3)),
	batch_size=int(os.environ["BATCH"])))
for epoch in range(2):
	for x, in loader:
		loss = model(x).square().mean(); loss.backward()

		optimizer.step(); optimizer.zero_grad()
text = """
the end
"""
assert text.count("the end\n") == 1
save(model.state_dict(), os.environ["OUT"])