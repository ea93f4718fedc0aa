"""The codecs beside a copy of the same memory: one thread, eight million numbers.

python benchmarks/codecs.py [--quick] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import torch
from command_line import arguments, compare
from samples import in_turns, per_call
from table import Row, report

from distwrap.comm.compressed import Cast, Codec, MinMax8, Sign

CODECS: dict[str, Codec] = {
    "float16": Cast(torch.float16),
    "bfloat16": Cast(torch.bfloat16),
    "min-max, 8 bits": MinMax8(),
    "sign, 1 bit": Sign(),
}
COUNT = 8_000_000
GOAL = 2.0


def main() -> None:
    """Time encoding and decoding in turns with a copy."""
    args = arguments(__doc__)
    if args.against:
        compare(__file__, args)
        return
    torch.set_num_threads(1)
    rounds, calls = (3, 1) if args.short else (15, 3)
    x = torch.randn(COUNT)
    copy, decoded = torch.empty_like(x), torch.empty_like(x)
    rows = []
    for name, codec in CODECS.items():
        codes = torch.empty(codec.size(COUNT), dtype=torch.uint8)
        codec.encode(x, codes)
        taken = in_turns(
            {
                "copy": per_call(lambda: copy.copy_(x), calls),
                "encode": per_call(lambda codec=codec, codes=codes: codec.encode(x, codes), calls),
                "decode": per_call(lambda codec=codec, codes=codes: codec.decode(codes, decoded), calls),
            },
            rounds,
        )
        there, back = (taken[way].over(taken["copy"]) for way in ("encode", "decode"))
        both = (there + back) / 2
        judged = name == "min-max, 8 bits"
        rows.append(Row(f"{name}: encode | copy", taken["encode"], taken["copy"], "ms", f"{there:.2f} times"))
        rows.append(
            Row(
                f"{name}: decode | copy",
                taken["decode"],
                taken["copy"],
                "ms",
                f"{back:.2f} times, on average of both {both:.2f}",
                f"<= {GOAL:g} on average" if judged else "",
                both <= GOAL if judged else None,
            )
        )
    report(f"Codecs, {COUNT:,} numbers, one thread", rows, [], args)


if __name__ == "__main__":
    main()
