import os
import torch
import horovod.torch as hvd
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

hvd.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 2))
loader = DataLoader(
    data,
    batch_size=int(os.environ["BATCH"]),
    sampler=DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False),
)
model = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(2):
    count = torch.zeros(1)
    for (x,) in loader:
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        count += len(x)
    count = hvd.allreduce(count, op=hvd.Sum)
    print(hvd.rank(), hvd.allgather(count).tolist())
torch.save(model.state_dict(), os.environ["OUT"])
