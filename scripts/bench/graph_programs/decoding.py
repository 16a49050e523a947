"""One decode step of a decoder-only transformer, captured as a graph for each batch size, under one allocator.

    python decoding.py native|expandable|stalloc MODEL SIZES ORDER KEEP       prints a JSON object of bytes

ORDER: largest, smallest or shuffled first, into one pool, or `separate`: a pool each. KEEP: logits that are kept, or
none. The bound is what lives on after each capture, and the most that a single capture needs beside.
"""

import gc
import json
import random
import sys
from typing import Any

#: width, layers, width of the feed-forward network, words
MODELS = {"small": (768, 6, 3072, 50257), "middle": (2048, 4, 5632, 32000), "wide": (4096, 4, 14336, 128256)}


def start(*, is_stalloc: bool) -> Any:
    """torch on a virtual H100, under stalloc or its own allocator."""
    from stalloc.device import activate, find_gpu

    if is_stalloc:
        import stalloc

        stalloc.install(device="virtual", gpu=find_gpu("H100"))
    else:
        activate("virtual", find_gpu("H100"))
    import torch

    torch.set_default_dtype(torch.bfloat16)
    return torch


def model_of(torch: Any, name: str) -> Any:
    """Embedding, blocks of a linear mixer and a gated feed-forward network, and a head."""
    width, layers, hidden, words = MODELS[name]

    class Block(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))
            self.project, self.out = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, width)
            self.up, self.down = torch.nn.Linear(width, 2 * hidden), torch.nn.Linear(hidden, width)

        def forward(self, x: Any) -> Any:
            keys, values = self.project(self.norms[0](x)).chunk(2, -1)
            x = x + self.out(torch.sigmoid(keys) * values)
            gate, up = self.up(self.norms[1](x)).chunk(2, -1)
            return x + self.down(torch.nn.functional.silu(gate) * up)

    return torch.nn.Sequential(
        torch.nn.Embedding(words, width), *(Block() for _ in range(layers)), torch.nn.Linear(width, words)
    )


def sizes_of(count: int) -> list[int]:
    return [1, 2, 4, *range(8, 8 * (count - 2), 8)][:count]


def main() -> None:
    allocator, name, count, order, keep = sys.argv[1:]
    torch = start(is_stalloc=allocator == "stalloc")
    cuda, sizes = torch.cuda, sizes_of(int(count))
    sizes.sort(reverse=order != "smallest")
    if order == "shuffled":
        random.Random(7).shuffle(sizes)
    graphs, kept, most_bytes, kept_bytes, pool = [], [], 0, 0, None
    with torch.no_grad():
        torch.set_default_device("cuda")
        model = model_of(torch, name)
        tokens = torch.zeros(max(sizes), dtype=torch.long, device="cuda")
        model(tokens[:1])  # libraries' own workspaces of the default stream
        gc.collect()
        cuda.empty_cache()
        before_bytes = cuda.memory_reserved()
        for size in sizes:
            model(tokens[:size])
            cuda.synchronize()
            cuda.empty_cache()
            at_begin = cuda.memory_allocated()
            cuda.reset_peak_memory_stats()
            graph = cuda.CUDAGraph()
            with cuda.graph(graph, pool=None if order == "separate" else pool):
                logits = model(tokens[:size])
            peak_bytes, pool = cuda.max_memory_allocated() - at_begin, graph.pool()
            graphs.append(graph)
            if keep == "logits":
                kept.append(logits)
            del logits
            lasting_bytes = cuda.memory_allocated() - at_begin
            kept_bytes, most_bytes = kept_bytes + lasting_bytes, max(most_bytes, peak_bytes - lasting_bytes)
        gc.collect()
        cuda.empty_cache()
        found = {"reserved": cuda.memory_reserved() - before_bytes, "bound": kept_bytes + most_bytes}
        for graph in graphs:
            graph.replay()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
