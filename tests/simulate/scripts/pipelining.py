"""A pipeline of as many stages as ranks: each rank builds its stage, the last one knows the loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WIDTH, MICROBATCHES = 6, 4

dist.init_process_group()
rank, stages = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def make_stage(index):
    torch.manual_seed(40 + index)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    if index == stages - 1:
        layers.append(nn.Linear(WIDTH, 2))
    return nn.Sequential(*layers).to(device, torch.float64)


module = make_stage(rank)
stage = PipelineStage(module, rank, stages, device)
schedule = ScheduleGPipe(stage, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
means = []
for step in range(3):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, WIDTH, dtype=torch.float64, generator=generator).to(device)
    y = x[:, :2].sin()
    losses = []
    inputs = (x,) if rank == 0 else ()
    if rank == stages - 1:
        schedule.step(*inputs, target=y, losses=losses)
    else:
        schedule.step(*inputs)
    optimizer.step()
    optimizer.zero_grad()
    if rank == stages - 1:
        means.append(torch.stack([loss.detach() for loss in losses]).mean().item())
weights = torch.zeros(stages, dtype=torch.float64, device=device)
weights[rank] = sum(p.detach().abs().sum() for p in module.parameters())
dist.all_reduce(weights)
told = [means]
dist.broadcast_object_list(told, src=stages - 1)
if rank == 0:
    print("RESULT losses", *(f"{mean:.8f}" for mean in told[0]))
    print("RESULT weights", *(f"{value:.8f}" for value in weights.tolist()))
dist.destroy_process_group()
