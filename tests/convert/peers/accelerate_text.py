"""Train a small classifier of sentences by Accelerate, on any number of processes."""

import argparse
import math
import os

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

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


def get_dataloaders(accelerator: Accelerator, batch_size: int = 16):
    """Creates a set of `DataLoader`s for the sentences."""
    with accelerator.main_process_first():
        train_dataset = Sentences(64, seed=0)
        eval_dataset = Sentences(27, seed=1)
    train_dataloader = DataLoader(
        train_dataset, shuffle=False, collate_fn=collate_fn, batch_size=batch_size, drop_last=True
    )
    eval_dataloader = DataLoader(eval_dataset, shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE)
    return train_dataloader, eval_dataloader


def training_function(config, args):
    # Initialize accelerator
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    # Sample hyper-parameters for learning rate, batch size, seed and a few other HPs
    lr = config["lr"]
    num_epochs = int(config["num_epochs"])
    seed = int(config["seed"])
    batch_size = int(config["batch_size"])

    set_seed(seed)
    torch.set_default_dtype(torch.float64)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = TextClassifier(len(train_dataloader.dataset.words))

    # We could avoid this line since the accelerator is set with `device_placement=True` (default value).
    model = model.to(accelerator.device)

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
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )

    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = num_epochs * num_update_steps_per_epoch
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=max_train_steps * accelerator.num_processes,
    )
    lr_scheduler = accelerator.prepare(lr_scheduler)

    logger.info("***** Running training *****")
    logger.info(f"  Num examples = {len(train_dataloader.dataset)}")
    logger.info(f"  Gradient accumulation steps = {args.gradient_accumulation_steps}")

    progress_bar = tqdm(range(max_train_steps), disable=not accelerator.is_local_main_process)
    completed_steps = 0

    # Now we train the model
    for epoch in range(num_epochs):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            # We could avoid this line since we set the accelerator with `device_placement=True`.
            batch = {key: value.to(accelerator.device) for key, value in batch.items()}
            with accelerator.accumulate(model):
                output = model(**batch)
                loss = output.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            # Checks if the accelerator has performed an optimization step behind the scenes
            if accelerator.sync_gradients:
                progress_bar.update(1)
                completed_steps += 1

        model.eval()
        samples_seen, correct = 0, 0
        for step, batch in enumerate(eval_dataloader):
            batch.to(accelerator.device) if hasattr(batch, "to") else None
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += (predictions == references).sum().item()
            samples_seen += references.shape[0]
        # Use accelerator.print to print only on the main process.
        accelerator.print(f"epoch {epoch}: accuracy {correct / samples_seen:.4f} of {samples_seen}")
        if accelerator.is_main_process:
            print(f"train loss {total_loss.item() / len(train_dataloader):.4f}, {completed_steps} steps")
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))

    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        unwrapped_model.save_pretrained(
            args.output_dir, state_dict=accelerator.get_state_dict(model), save_function=accelerator.save
        )
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    parser.add_argument("--output_dir", type=str, default="results")
    args = parser.parse_args()
    config = {"lr": 2e-2, "num_epochs": 3, "seed": 42, "batch_size": args.batch_size}
    training_function(config, args)


if __name__ == "__main__":
    main()
