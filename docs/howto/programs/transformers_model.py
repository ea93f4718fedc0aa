"""Train a small GPT-2 of transformers on two ranks, save it in Hugging Face's format, and load it with transformers."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from distwrap import (
    distributed,
    is_rank_zero,
    mean,
    optimizer_step,
    rank_zero_first,
    shard_loader,
    unwrap_model,
    wrap_model,
)


@distributed(nprocs=2, seed=0)
def main() -> float:
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    with rank_zero_first(local=True):  # where from_pretrained downloads, one rank of each node does
        model = GPT2LMHeadModel(config)  # or GPT2LMHeadModel.from_pretrained("gpt2")
    model = wrap_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randint(64, (32, 16)))
    loader = shard_loader(DataLoader(data, batch_size=8, shuffle=True), batch_size="global")
    for (tokens,) in loader:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer_step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    if is_rank_zero():
        unwrap_model(model).save_pretrained("trained")
    written = model.eval().generate(tokens[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert 4 < written.shape[1] <= 7
    return mean(loss.item(), len(tokens))


if __name__ == "__main__":
    print(f"loss {main():.2f}")
    weights = GPT2LMHeadModel.from_pretrained("trained").state_dict()
    assert all(value.isfinite().all() for value in weights.values())
