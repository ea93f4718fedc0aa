"""Train a small classifier of sentences by Accelerate, on any number of processes."""

import argparse
import math
import os

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from distwrap import (
    accumulate,
    backward,
    barrier,
    device,
    distributed,
    gather,
    get_logger,
    is_rank_zero,
    local_rank,
    optimizer_step,
    print as distwrap_print,
    rank_zero_first,
    run_state,
    save,
    seed_everything,
    shard_loader,
    unscale,
    unwrap_model,
    world_size,
    wrap_model,
)

logger = get_logger(__name__)

MAX_LENGTH = 12
EVAL_BATCH_SIZE = 8

GOOD = "lovely great fine wonderful moving".split()
BAD = "dull awful weak tedious poor".split()
OTHERS = "the film was a story of two people and their long journey by sea".split()


class Sentences(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.words = {word: number for number, word in enumerate(["[PAD]", *GOOD, *BAD, *OTHERS])}
        self.rows = []
        for _ in range(size):
            label = int(torch.randint(0, 2, (1,), generator=generator))
            length = int(torch.randint(3, MAX_LENGTH, (1,), generator=generator))
            picks = torch.randint(0, len(OTHERS), (length,), generator=generator).tolist()
            words = [OTHERS[pick] for pick in picks]
            words[length // 2] = (GOOD if label else BAD)[picks[0] % 5]
            self.rows.append({"input_ids": [self.words[word] for word in words], "labels": label})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate_fn(rows):
    ids = torch.zeros(len(rows), MAX_LENGTH, dtype=torch.long)
    mask = torch.zeros(len(rows), MAX_LENGTH, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[number, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows])}


class Output:
    def __init__(self, loss, logits):
        self.loss = loss
        self.logits = logits


class TextClassifier(nn.Module):
    def __init__(self, num_words, hidden_size=16, num_labels=2):
        super().__init__()
        self.embeddings = nn.Embedding(num_words, hidden_size)
        self.layer = nn.TransformerEncoderLayer(hidden_size, 2, 32, dropout=0.0, batch_first=True)
        self.classifier = nn.Linear(hidden_size, num_labels)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.layer(self.embeddings(input_ids), src_key_padding_mask=attention_mask == 0)
        weights = attention_mask.unsqueeze(-1)
        logits = self.classifier((hidden * weights).sum(1) / weights.sum(1))
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return Output(loss, logits)

    def save_pretrained(self, folder, state_dict, save_function):
        os.makedirs(folder, exist_ok=True)
        save_function(state_dict, os.path.join(folder, "pytorch_model.bin"))


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def factor(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, factor)


def get_dataloaders(batch_size: int = 16):
    """Creates a set of `DataLoader`s for the sentences."""
    with rank_zero_first():
        train_dataset = Sentences(64, seed=0)
        eval_dataset = Sentences(27, seed=1)
    train_dataloader = DataLoader(
        train_dataset, shuffle=False, collate_fn=collate_fn, batch_size=batch_size, drop_last=True
    )
    eval_dataloader = DataLoader(eval_dataset, shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE)
    return train_dataloader, eval_dataloader


@distributed
def training_function(config, args):
    # Initialize accelerator
    # Sample hyper-parameters for learning rate, batch size, seed and a few other HPs
    lr = config["lr"]
    num_epochs = int(config["num_epochs"])
    seed = int(config["seed"])
    batch_size = int(config["batch_size"])

    seed_everything(seed)
    torch.set_default_dtype(torch.float64)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size)
    model = TextClassifier(len(train_dataloader.dataset.words))

    # We could avoid this line since the accelerator is set with `device_placement=True` (default value).
    model = model.to(device())

    # Instantiate optimizer
    no_decay = ["bias", "norm"]
    grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = AdamW(grouped_parameters, lr=lr)

    # Prepare everything
    model = wrap_model(model)
    train_dataloader = shard_loader(train_dataloader)
    eval_dataloader = shard_loader(eval_dataloader)

    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = num_epochs * num_update_steps_per_epoch
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=2 * world_size(),
        num_training_steps=max_train_steps * world_size(),
    )

    logger.info("***** Running training *****", rank_zero=True)
    logger.info(f"  Num examples = {len(train_dataloader.dataset)}", rank_zero=True)
    logger.info(f"  Gradient accumulation steps = {args.gradient_accumulation_steps}", rank_zero=True)

    progress_bar = tqdm(range(max_train_steps), disable=not local_rank() == 0)
    completed_steps = 0

    # Now we train the model
    for epoch in range(num_epochs):
        model.train()
        total_loss = 0
        for step, (batch, window) in enumerate(accumulate(train_dataloader, args.gradient_accumulation_steps, model)):
            # We could avoid this line since we set the accelerator with `device_placement=True`.
            batch = {key: value.to(device()) for key, value in batch.items()}
            output = model(**batch)
            loss = output.loss
            total_loss += loss.detach().float()
            backward(loss / args.gradient_accumulation_steps)
            if window.last:
                unscale(optimizer); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if window.last:
                optimizer_step(optimizer)
                for _ in range(world_size()): lr_scheduler.step()
                optimizer.zero_grad()

            # Checks if the accelerator has performed an optimization step behind the scenes
            if window.last:
                progress_bar.update(1)
                completed_steps += 1

        model.eval()
        samples_seen, correct = 0, 0
        for step, batch in enumerate(eval_dataloader):
            batch.to(device()) if hasattr(batch, "to") else None
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = gather((predictions, batch["labels"]))
            correct += (predictions == references).sum().item()
            samples_seen += references.shape[0]
        # Use accelerator.print to print only on the main process.
        distwrap_print(f"epoch {epoch}: accuracy {correct / samples_seen:.4f} of {samples_seen}")
        if is_rank_zero():
            print(f"train loss {total_loss.item() / len(train_dataloader):.4f}, {completed_steps} steps")
        os.makedirs(os.path.join(args.output_dir, f"epoch_{epoch}"), exist_ok=True)
        save({"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "run": run_state()}, os.path.join(os.path.join(args.output_dir, f"epoch_{epoch}"), "state.pt"))

    barrier()
    unwrapped_model = unwrap_model(model)
    if is_rank_zero():
        unwrapped_model.save_pretrained(
            args.output_dir, state_dict=model.state_dict(), save_function=save
        )


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    parser.add_argument("--output_dir", type=str, default="results")
    args = parser.parse_args()
    config = {"lr": 2e-2, "num_epochs": 3, "seed": 42, "batch_size": args.batch_size}
    training_function.options(precision=args.mixed_precision or "no")(config, args)


if __name__ == "__main__":
    main()
