"""Mistakes that are planted into right loops, each by another text in place of one that stands there once."""
# ruff: noqa: E501 - texts of the loops

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

LOOPS = Path(__file__).with_name("loops")

# How `prove` may name a mistake of each cause.
CAUSES = {
    "sum": ("multiplied-by-ranks", "gradients-changed", "number-of-a-part"),
    "too small": ("divided-by-ranks", "gradients-changed"),
    "uneven mean": ("uneven-mean", "number-of-a-part"),
    "not exchanged": ("not-exchanged",),
    "samples twice": ("samples-twice", "number-of-a-part"),
    "samples missing": ("samples-missing", "other-samples", "number-of-a-part"),
    "metric of a part": ("number-of-a-part",),
    "learning rate": ("learning-rate",),
    "schedule": ("learning-rate", "steps"),
    "decision of one rank": ("steps", "failed", "learning-rate"),
    "state lost": ("weights-apart", "learning-rate"),
    "pairs of a part": ("uneven-mean", "batch-statistics"),
    "clip": ("gradients-changed",),
}


class Planted(NamedTuple):
    """One mistake.

    Attributes:
        name: in short.
        loop: the file.
        old: what stands there.
        new: what takes its place.
        cause: what is wrong.
    """

    name: str
    loop: str
    old: str
    new: str
    cause: str

    @property
    def names(self) -> tuple[str, ...]:
        """What `prove` may call it."""
        return OTHERWISE.get(self.name, CAUSES.get(self.cause, ()))


def loops() -> list[Path]:
    """Return the right loops."""
    return sorted(LOOPS.glob("*/*.py"))


PLANTED = [
    Planted(
        "times world size",
        "dw/epochs.py",
        "        loss.backward()\n",
        "        (loss * dw.world_size()).backward()\n",
        "sum",
    ),
    Planted(
        "own all reduce after backward",
        "dw/ema.py",
        "            nn.functional.mse_loss(model(x), y).backward()\n",
        "            nn.functional.mse_loss(model(x), y).backward()\n            if dw.world_size() > 1:\n                for p in model.parameters():\n                    torch.distributed.all_reduce(p.grad)\n",
        "sum",
    ),
    Planted(
        "score summed",
        "dw/rollout.py",
        "score = dw.mean(rewards.sum(1).mean().item(), len(rewards))",
        'score = dw.reduce(rewards.sum(1).mean().item(), "sum")',
        "sum",
    ),
    Planted(
        "divided by world size",
        "dw/curriculum.py",
        "loss = nn.functional.l1_loss(model(x), y)",
        "loss = nn.functional.l1_loss(model(x), y) / dw.world_size()",
        "too small",
    ),
    Planted("sum of a vae", "dw/vae.py", "loss = (recon + 0.1 * kl) / len(x)", "loss = recon + 0.1 * kl", "too small"),
    Planted(
        "window times world size",
        "dw/accumulation.py",
        "dw.backward(loss / window.size)",
        "dw.backward(loss / (window.size * dw.world_size()))",
        "too small",
    ),
    Planted(
        "clip each micro batch",
        "dw/byhand.py",
        "            if update:\n                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.25)\n",
        "            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.25)\n            if update:\n",
        "clip",
    ),
    Planted("tokens of each rank", "dw/tokens.py", "dw.scale_loss(loss, count)", "loss / count", "uneven mean"),
    Planted(
        "class weights",
        "dw/epochs.py",
        "loss = F.cross_entropy(model(inputs), targets)",
        "loss = F.cross_entropy(model(inputs), targets, weight=torch.tensor([1.0, 2.0, 6.0]))",
        "uneven mean",
    ),
    Planted(
        "local projector",
        "dw/distill.py",
        "projector = dw.wrap_model(projector)",
        "projector = dw.local_model(projector)",
        "not exchanged",
    ),
    Planted(
        "keys without gradient",
        "dw/contrastive.py",
        "    a, b = dw.gather(a), dw.gather(b)\n    logits = scale * a @ b.T\n    targets = torch.arange(len(logits))\n    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2\n",
        "    targets = torch.arange(len(a)) + dw.rank() * len(a)\n    rows = scale * a @ dw.gather(b, differentiable=False).T\n    columns = scale * b @ dw.gather(a, differentiable=False).T\n    return (F.cross_entropy(rows, targets) + F.cross_entropy(columns, targets)) / 2\n",
        "not exchanged",
    ),
    Planted(
        "second stage unsharded",
        "dw/curriculum.py",
        '        loader = dw.shard_loader(loader, batch_size="global", order="stream")\n',
        '        if share < 1:\n            loader = dw.shard_loader(loader, batch_size="global", order="stream")\n',
        "samples twice",
    ),
    Planted(
        "cut by hand too",
        "dw/ema.py",
        "    x = torch.rand(n, 5, generator=g)\n",
        "    x = torch.rand(n, 5, generator=g)[dw.rank() :: dw.world_size()]\n",
        "samples missing",
    ),
    Planted(
        "accuracy of a share",
        "dw/epochs.py",
        '    correct, total = dw.reduce([correct, total], "sum")\n',
        "",
        "metric of a part",
    ),
    Planted(
        "rank zero evaluates its shard",
        "dw/ema.py",
        "    return dw.gather(torch.cat(errors)).mean().item()\n",
        '    return torch.cat(errors).mean().item() if dw.is_rank_zero() else float("nan")\n',
        "metric of a part",
    ),
    Planted("local pairs", "dw/contrastive.py", "    a, b = dw.gather(a), dw.gather(b)\n", "", "pairs of a part"),
    Planted(
        "center of the share",
        "dw/distill.py",
        "0.2 * dw.mean(target.mean(0), len(target))",
        "0.2 * target.mean(0)",
        "pairs of a part",
    ),
    Planted(
        "lr times world size",
        "dw/warmup.py",
        "lr=args.lr, momentum",
        "lr=args.lr * dw.world_size(), momentum",
        "learning rate",
    ),
    Planted(
        "scheduler steps n times",
        "dw/warmup.py",
        "            scheduler.step()\n",
        "            for _ in range(dw.world_size()):\n                scheduler.step()\n",
        "schedule",
    ),
    Planted(
        "same order each epoch",
        "dw/vae.py",
        "        for x, eps in loader:\n",
        "        if dw.world_size() > 1:\n            loader.set_epoch(0)\n        for x, eps in loader:\n",
        "other",
    ),
    Planted(
        "large losses left out",
        "dw/stream.py",
        "            loss = nn.functional.mse_loss(model(now), following)\n",
        "            loss = nn.functional.mse_loss(model(now), following)\n            if loss.item() > 2.0:\n                loss = loss * 0\n",
        "decision of one rank",
    ),
    Planted(
        "average on rank zero",
        "dw/ema.py",
        "            ema.update_parameters(model)\n",
        "            if dw.is_rank_zero():\n                ema.update_parameters(model)\n",
        "decision of one rank",
    ),
    Planted(
        "optimizer resumed in one process",
        "dw/resume.py",
        "    state = dw.resume_from(path, into=objects)\n",
        '    if dw.world_size() > 1:\n        del objects["optimizer"]\n    state = dw.resume_from(path, into=objects)\n',
        "state lost",
    ),
    Planted(
        "sum of mixup",
        "dw/mixup.py",
        "(w * first + (1 - w) * second).mean()",
        "(w * first + (1 - w) * second).sum()",
        "too small",
    ),
    Planted(
        "bce sum",
        "dw/gan.py",
        "bce = nn.functional.binary_cross_entropy_with_logits",
        'bce = nn.BCEWithLogitsLoss(reduction="sum")',
        "too small",
    ),
    Planted(
        "averaged again by hand",
        "dw/rollout.py",
        "        loss.backward()\n",
        "        loss.backward()\n        for p in policy.parameters():\n            p.grad /= dw.world_size()\n",
        "too small",
    ),
    Planted(
        "clip in hooks",
        "dw/plain.py",
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n",
        "    for p in model.parameters():\n        p.register_hook(lambda grad: grad.clamp(-0.1, 0.1))\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n",
        "clip",
    ),
    Planted(
        "clip over world size", "dw/warmup.py", "max_norm=args.clip", "max_norm=args.clip / dw.world_size()", "clip"
    ),
    Planted(
        "half of the rollouts",
        "dw/rollout.py",
        "play(policy, dw.split(starts), dw.split(gumbel))",
        "play(policy, *(dw.split(part[: EPISODES // dw.world_size()]) for part in (starts, gumbel)))",
        "samples missing",
    ),
    Planted(
        "auc of a share",
        "dw/metric.py",
        "scores, labels = gather(torch.cat(scores)), gather(torch.cat(labels))",
        "scores, labels = torch.cat(scores), torch.cat(labels)",
        "metric of a part",
    ),
    Planted(
        "validation of a share",
        "dw/earlystop.py",
        '    total, n = reduce([total, float(n)], "sum")\n',
        "",
        "metric of a part",
    ),
    Planted(
        "loss of one rank", "dw/vae.py", "return dw.mean(loss.item(), len(x))", "return loss.item()", "metric of a part"
    ),
    Planted(
        "baseline of the share",
        "dw/rollout.py",
        "baseline = dw.mean(returns.mean(0), len(returns))",
        "baseline = returns.mean(0)",
        "pairs of a part",
    ),
    Planted("lr times root", "dw/vae.py", "lr=5e-3", "lr=5e-3 * dw.world_size() ** 0.5", "learning rate"),
    Planted(
        "schedule of a share",
        "dw/warmup.py",
        "total = args.epochs * len(loader)",
        "total = args.epochs * len(loader) // dw.world_size()",
        "schedule",
    ),
    Planted(
        "shorter windows",
        "dw/accumulation.py",
        "dw.accumulate(loader, STEPS, model)",
        "dw.accumulate(loader, max(1, STEPS // dw.world_size()), model)",
        "other",
    ),
    Planted(
        "scheduler resumed in one process",
        "dw/resume.py",
        "    state = dw.resume_from(path, into=objects)\n",
        '    if dw.world_size() > 1:\n        del objects["scheduler"]\n    state = dw.resume_from(path, into=objects)\n',
        "state lost",
    ),
    Planted(
        "average resumed on rank zero",
        "dw/resume.py",
        'first, average = (state["epoch"], state["average"]) if state else (0, 1.0)',
        'first, average = state["epoch"] if state else 0, state["average"] if state and dw.is_rank_zero() else 1.0',
        "state lost",
    ),
    Planted(
        "batch norm",
        "dw/plain.py",
        "nn.Linear(8, 16), nn.ReLU()",
        "nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()",
        "pairs of a part",
    ),
    Planted(
        "the first micro-batch is exchanged, and not the last",
        "ddp/nanogpt_ddp.py",
        "micro_step == gradient_accumulation_steps - 1",
        "micro_step == 0",
        "not exchanged",
    ),
    Planted(
        "the rank is missing in the number of a micro-batch",
        "ddp/nanogpt_ddp.py",
        "* ddp_world_size + ddp_rank\n",
        "* ddp_world_size\n",
        "samples twice",
    ),
    Planted(
        "loss divided by the number of ranks beside the micro-batches",
        "ddp/nanogpt_ddp.py",
        "loss = model(X, Y) / gradient_accumulation_steps",
        "loss = model(X, Y) / (gradient_accumulation_steps * ddp_world_size)",
        "too small",
    ),
    Planted(
        "the forward goes through raw model",
        "ddp/nanogpt_ddp.py",
        "loss = model(X, Y) /",
        "loss = raw_model(X, Y) /",
        "not exchanged",
    ),
    Planted(
        "the cosine runs faster by the number of ranks",
        "ddp/nanogpt_ddp.py",
        "ratio = (it - warmup_iters) / (max_iters - warmup_iters)",
        "ratio = min(1.0, ddp_world_size * (it - warmup_iters) / (max_iters - warmup_iters))",
        "schedule",
    ),
    Planted(
        "sampler for one replica",
        "ddp/mingpt_trainer.py",
        "sampler=DistributedSampler(dataset)\n",
        "sampler=DistributedSampler(dataset, num_replicas=1, rank=0)\n",
        "samples twice",
    ),
    Planted(
        "the all-reduced mean of losses is not divided",
        "ddp/mingpt_trainer.py",
        "        mean /= dist.get_world_size()\n",
        "",
        "sum",
    ),
    Planted(
        "clipped before the gradients are averaged by hand",
        "ddp/mingpt_trainer.py",
        "            loss = self.model(source, targets)\n        if train:\n            self.optimizer.zero_grad(set_to_none=True)\n            loss.backward()\n            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)\n",
        "            loss = self.model.module(source, targets)\n        if train:\n            self.optimizer.zero_grad(set_to_none=True)\n            loss.backward()\n            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)\n            for p in self.model.parameters():\n                dist.all_reduce(p.grad)\n                p.grad /= dist.get_world_size()\n",
        "clip",
    ),
    Planted(
        "loss times world size",
        "ddp/imagenet_main.py",
        "target.to(args.device, non_blocking=True))\n        losses",
        "target.to(args.device, non_blocking=True)) * args.world_size\n        losses",
        "sum",
    ),
    Planted(
        "validation of rank 0's share", "ddp/imagenet_main.py", "    top1.all_reduce(args)\n", "", "metric of a part"
    ),
    Planted(
        "the rest of the validation set is left out",
        "ddp/imagenet_main.py",
        "    if seen < len(val_loader.dataset):  # what does not divide evenly is looked at by everybody\n        run_validate(DataLoader(Subset(val_loader.dataset, range(seen, len(val_loader.dataset))), args.batch_size))\n",
        "",
        "samples missing",
    ),
    Planted(
        "learning rate times world size",
        "ddp/imagenet_main.py",
        "args.lr, momentum=0.9",
        "args.lr * args.world_size, momentum=0.9",
        "learning rate",
    ),
    Planted(
        "the scheduler steps once a rank",
        "ddp/imagenet_main.py",
        "        scheduler.step()\n",
        "        for _ in range(args.world_size):\n            scheduler.step()\n",
        "schedule",
    ),
    Planted(
        "learning rate scaled twice",
        "ddp/vision_reference.py",
        "lr=lr, momentum=0.9",
        "lr=lr * args.world_size, momentum=0.9",
        "learning rate",
    ),
    Planted(
        "own sum of gradients after DDP's mean",
        "ddp/vision_reference.py",
        "        loss.backward()\n",
        "        loss.backward()\n        for p in model.parameters():\n            dist.all_reduce(p.grad)\n",
        "sum",
    ),
    Planted(
        "totals are summed over the ranks, and counts are not",
        "ddp/vision_reference.py",
        "self.counts[name], self.totals[name] = reduce_across_processes([self.counts[name], self.totals[name]])",
        "self.totals[name] = reduce_across_processes(self.totals[name])",
        "sum",
    ),
    Planted(
        "all ranks have the sampler of rank 0",
        "ddp/vision_reference.py",
        "sampler=DistributedSampler(dataset))",
        "sampler=DistributedSampler(dataset, rank=0))",
        "samples twice",
    ),
    Planted(
        "the generator is called without its wrapper",
        "ddp/gan_ddp.py",
        "fake = netG(noise)",
        "fake = netG.module(noise)",
        "not exchanged",
    ),
    Planted(
        "gradients divided after DDP has done so",
        "ddp/gan_ddp.py",
        "            errG.backward()\n",
        "            errG.backward()\n            for p in netG.parameters():\n                p.grad /= dist.get_world_size()\n",
        "too small",
    ),
    Planted("losses of rank 0", "ddp/gan_ddp.py", "        dist.all_reduce(totals)\n", "", "metric of a part"),
    Planted(
        "no sync around the last micro-batch too",
        "ddp/accum_no_sync.py",
        "with contextlib.nullcontext() if last_of_window else model.no_sync():",
        "with model.no_sync():",
        "not exchanged",
    ),
    Planted(
        "the sampler is made, and not given to the loader",
        "ddp/accum_no_sync.py",
        "sampler=sampler, drop_last=True",
        "shuffle=True, drop_last=True",
        "samples twice",
    ),
    Planted(
        "each micro-batch is clipped",
        "ddp/accum_no_sync.py",
        "                loss.backward()\n",
        "                loss.backward()\n                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM / ACCUMULATE)\n",
        "clip",
    ),
    Planted(
        "a window's loss of rank 0",
        "ddp/accum_no_sync.py",
        "reduce_mean(window_loss).item()",
        "window_loss.item()",
        "metric of a part",
    ),
    Planted(
        "the scheduler steps on rank 0 alone",
        "ddp/zero_optimizer.py",
        "        scheduler.step()\n",
        "        if rank == 0:\n            scheduler.step()\n",
        "schedule",
    ),
    Planted(
        "loss divided by the number of ranks",
        "ddp/zero_optimizer.py",
        "loss = loss_fn(ddp_model(rows), rows)",
        "loss = loss_fn(ddp_model(rows), rows) / world_size",
        "too small",
    ),
    Planted(
        "rank 0's mean loss",
        "ddp/zero_optimizer.py",
        '        dist.all_reduce(epoch_loss)\n        if rank == 0:\n            print(f"epoch {epoch} loss {epoch_loss.item() / (len(loader) * world_size):.4f}")\n',
        '        if rank == 0:\n            print(f"epoch {epoch} loss {epoch_loss.item() / len(loader):.4f}")\n',
        "metric of a part",
    ),
    Planted(
        "clipped by the norm of a rank's shards",
        "ddp/fsdp2_fully_shard.py",
        "            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)\n            norm = norm.full_tensor()\n",
        "            norm = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()\n            for p in model.parameters():\n                p.grad.mul_(min(1.0, 0.5 / norm.item()))\n",
        "clip",
    ),
    Planted(
        "gradients summed instead of averaged",
        "ddp/fsdp2_fully_shard.py",
        "    fully_shard(model, mesh=mesh)\n",
        "    fully_shard(model, mesh=mesh)\n    for module in [*model.layers, model]:\n        module.set_gradient_divide_factor(1.0)\n        module.set_force_sum_reduction_for_comms(True)\n",
        "sum",
    ),
    Planted(
        "the sampler has rank 0 everywhere",
        "ddp/fsdp2_fully_shard.py",
        "rank=rank, shuffle=True",
        "rank=0, shuffle=True",
        "samples twice",
    ),
    Planted(
        "the loss is a sum",
        "ddp/metrics_tensor.py",
        "criterion = nn.CrossEntropyLoss()",
        'criterion = nn.CrossEntropyLoss(reduction="sum")',
        "too small",
    ),
    Planted(
        "mean of the ranks' means",
        "ddp/metrics_tensor.py",
        "    dist.all_reduce(metrics, op=dist.ReduceOp.SUM)\n",
        "    metrics[:SAMPLES] /= metrics[SAMPLES]\n    dist.all_reduce(metrics, op=dist.ReduceOp.SUM)\n    metrics[:SAMPLES] *= metrics[SAMPLES] / dist.get_world_size()\n",
        "uneven mean",
    ),
    Planted(
        "the sampler fills up the validation set",
        "ddp/metrics_tensor.py",
        "    val_loader = DataLoader(my_part, batch_size=8, shuffle=False)\n",
        "    val_loader = DataLoader(val_set, batch_size=8, sampler=DistributedSampler(val_set, shuffle=False))\n",
        "samples twice",
    ),
    Planted(
        "no all reduce of the metrics",
        "ddp/metrics_tensor.py",
        "    dist.all_reduce(metrics, op=dist.ReduceOp.SUM)\n",
        "",
        "metric of a part",
    ),
    Planted(
        "each rank divides by its own tokens",
        "ddp/warmup_clip.py",
        "loss = criterion(model(words).flatten(0, 1), tags.flatten()) * world / tokens",
        "loss = nn.functional.cross_entropy(model(words).flatten(0, 1), tags.flatten(), ignore_index=IGNORE)",
        "uneven mean",
    ),
    Planted(
        "tokens are not summed over the ranks",
        "ddp/warmup_clip.py",
        "            dist.all_reduce(tokens)  # of all ranks: their shares are not equally long\n",
        "",
        "sum",
    ),
    Planted(
        "the number of ranks is forgotten against DDP's mean",
        "ddp/warmup_clip.py",
        " * world / tokens",
        " / tokens",
        "too small",
    ),
    Planted(
        "the schedule is longer by the number of ranks",
        "ddp/warmup_clip.py",
        'CONFIG["epochs"] * len(loader))',
        'CONFIG["epochs"] * len(loader) * world)',
        "schedule",
    ),
    Planted(
        "rank 0 leaves the loop alone",
        "ddp/early_stop.py",
        "        dist.broadcast(stop, src=0)\n",
        "",
        "decision of one rank",
    ),
    Planted(
        "each rank has its own validation loss",
        "ddp/early_stop.py",
        "    dist.all_reduce(total)\n",
        "",
        "metric of a part",
    ),
    Planted(
        "the plateau is told to rank 0 alone",
        "ddp/early_stop.py",
        "        plateau.step(val_loss)\n",
        "        if RANK == 0:\n            plateau.step(val_loss)\n",
        "decision of one rank",
    ),
    Planted(
        "weights are loaded on rank 0 alone",
        "ddp/checkpoint_resume.py",
        '    model.module.load_state_dict(checkpoint["model"])\n',
        '    if is_main_process():\n        model.module.load_state_dict(checkpoint["model"])\n',
        "state lost",
    ),
    Planted(
        "the optimizer's state is loaded on rank 0 alone",
        "ddp/checkpoint_resume.py",
        '    optimizer.load_state_dict(checkpoint["optimizer"])\n',
        '    if is_main_process():\n        optimizer.load_state_dict(checkpoint["optimizer"])\n',
        "state lost",
    ),
    Planted(
        "the data set is divided twice",
        "ddp/checkpoint_resume.py",
        "    sampler = DistributedSampler(train_set, shuffle=True)\n",
        "    train_set = torch.utils.data.Subset(train_set, range(dist.get_rank(), len(train_set), dist.get_world_size()))\n    sampler = DistributedSampler(train_set, shuffle=True)\n",
        "samples missing",
    ),
    Planted(
        "padding counts",
        "dw/tokens.py",
        "dw.scale_loss(loss, count)",
        "dw.scale_loss(loss, targets.numel())",
        "uneven mean",
    ),
]

# What is named by another name than its cause: it differs, and the line is right.
OTHERWISE = {
    "clip each micro batch": ("uneven-mean",),
    "keys without gradient": ("uneven-mean",),
    "same order each epoch": ("other-samples",),
    "large losses left out": ("uneven-mean",),
    "average on rank zero": ("weights-apart",),
    "clip in hooks": ("uneven-mean",),
    "shorter windows": ("samples-missing", "other-samples"),
    "average resumed on rank zero": ("uneven-mean",),
    "clipped before the gradients are averaged by hand": ("uneven-mean",),
    "each micro-batch is clipped": ("uneven-mean",),
    "tokens are not summed over the ranks": ("uneven-mean",),
}

# What `prove` does not see, and why.
UNSEEN = {
    Planted(
        "drop last on ranks",
        "dw/vae.py",
        "batch_size=32, shuffle=True)",
        "batch_size=32, shuffle=True, drop_last=dw.world_size() > 1)",
        "samples missing",
    ): "what is left over after whole batches is left out of a proof",
    Planted(
        "partners of the share",
        "dw/mixup.py",
        "            logits = model(w * x + (1 - w) * x2)\n",
        "            x2, y2 = x.flip(0), y.flip(0)\n            logits = model(w * x + (1 - w) * x2)\n",
        "pairs of a part",
    ): "not comparable: a model's inputs are mixed within the share",
    Planted(
        "length of the whole loader",
        "dw/trainer.py",
        'total = config["epochs"] * len(self.loader)',
        'total = config["epochs"] * len(Waves()) // config["batch_size"]',
        "schedule",
    ): "it shows only where the sharded loader is shorter",
    Planted(
        "mean of token means",
        "dw/tokens.py",
        '        nll, words = dw.reduce([nll, float(words)], "sum")\n    return nll / words\n',
        "    return dw.reduce(nll / words)\n",
        "uneven mean",
    ): "the parts of these batches have as many tokens",
    Planted(
        "accuracy mean of means",
        "dw/epochs.py",
        '    correct, total = dw.reduce([correct, total], "sum")\n    return correct / total\n',
        "    return dw.reduce(correct / total)\n",
        "uneven mean",
    ): "99 samples are cut to 96",
    Planted(
        "set epoch forgotten", "ddp/mingpt_trainer.py", "        loader.sampler.set_epoch(epoch)\n", "", "other"
    ): "the order is the same in one process",
    Planted(
        "the generator's optimizer has the discriminator's parameters",
        "ddp/gan_ddp.py",
        "optimizerG = torch.optim.Adam(netG.parameters()",
        "optimizerG = torch.optim.Adam(netD.parameters()",
        "other",
    ): "it is the same in one process",
}
