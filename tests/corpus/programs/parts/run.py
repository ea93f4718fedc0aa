"""Train the programs of tests/programs as they stood at the fixed point, twenty of the 160, and print what they found."""

import sys
import tempfile
from pathlib import Path

import torch
from parts import chosen

import distwrap as dw
from distwrap.testing import run_ranks


def train(part: int, folder: Path) -> list[str]:
    torch.set_num_threads(1)
    lines = []
    for number, program in enumerate(chosen(160)[part::8]):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        try:
            weights, measured = program.run(place)
        except dw.DistwrapError as error:
            lines.append(f"{program}: {type(error).__name__}")
        else:
            norms = [f"{value.double().norm():.8f}" for value in weights.values()]
            lines.append(f"{program}: {' '.join(norms)} | {' '.join(f'{each:.8f}' for each in measured)}")
    return lines


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        one, other = run_ranks(train, 2, int(sys.argv[1]), Path(folder), timeout=100)
    print(*one, sep="\n")
    print("both ranks found the same:", one == other)
