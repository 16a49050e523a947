"""Asks for a block that is free as soon as another stream is done, in a segment that cannot be given back whole.

`python pending_block.py MIB`: a card of four times that has room for it only there.
"""

import sys

import torch

unit, side = int(sys.argv[1]) << 20, torch.cuda.Stream()


def block(num: int) -> torch.Tensor:
    return torch.empty(num * unit, dtype=torch.uint8, device="cuda")


whole = block(3)
del whole
kept, used = block(1), block(2)  # parts of its segment, which stays for the one that is kept
with torch.cuda.stream(side):
    used.add_(1)
used.record_stream(side)
del used
block(2)
