"""Four layers whose weights come on a side stream: how many blocks they take, as JSON.

`python blocks_of_layers.py COMPLETION MIB`: by record_stream, and by references that are kept until the side stream has
waited for the layer that used them.
"""

import json
import sys
from typing import Any

from stalloc import device

device.activate("virtual")

import torch  # noqa: E402

from stalloc.device import virtual  # noqa: E402

virtual.complete(sys.argv[1])
SIZE = int(sys.argv[2]) << 20
main, side = torch.cuda.current_stream(), torch.cuda.Stream()


def gathered() -> torch.Tensor:
    with torch.cuda.stream(side):
        weights = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    main.wait_stream(side)
    return weights


def by_record_stream() -> None:
    for _ in range(4):
        weights = gathered()
        weights.add_(1)
        weights.record_stream(main)
        del weights


def by_references() -> None:
    kept: list[tuple[Any, Any]] = []
    for _ in range(4):
        weights = gathered()
        weights.add_(1)
        kept.append((weights, main.record_event()))
        del weights
        if len(kept) == 2:
            side.wait_event(kept[0][1])
            del kept[0]


counts = []
for program in (by_record_stream, by_references):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    program()
    counts.append(torch.cuda.max_memory_reserved() // SIZE)
print(json.dumps(counts))
