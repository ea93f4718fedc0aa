import os

import torch
from distwrap import distributed, load, save, split, wrap_model


@distributed
def train_main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    size = 8
    model = wrap_model(torch.nn.Linear(3, 1))


    def main():
        order = torch.arange(31, -1, -1)
        for epoch in range(2):
            for start in range(0, len(x), size):
                index = split(order[start : start + size])
                loss = (model(x[index]).sum(1) - x[index].sum(1)).square().mean()
                model.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad
        save(model.state_dict(), os.environ["OUT"])
        model.load_state_dict(load(os.environ["OUT"]))


    main()


if __name__ == "__main__":
    train_main()
