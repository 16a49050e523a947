"""A server's steps: a graph of the decode step, then its choice of tokens, and a part of a prompt without a graph.

    python serving_steps.py native|expandable|stalloc|lent MODEL SIZES       prints a JSON object of bytes

`lent`: stalloc, with all but the graphs inside of `stalloc.borrow_graph_memory()`. A part of a prompt has at most as
many tokens as the largest graph. Reserved is the most from when the model was there.
"""

import contextlib
import json
import random
import sys
from typing import Any

from decoding import model_of, sizes_of, start

STEPS = 200


def main() -> None:
    allocator, name, count = sys.argv[1:]
    torch = start(is_stalloc=allocator in ("stalloc", "lent"))
    borrow: Any = contextlib.nullcontext
    if allocator == "lent":
        import stalloc

        borrow = stalloc.borrow_graph_memory
    cuda, sizes, draw = torch.cuda, sizes_of(int(count))[::-1], random.Random(7)
    graphs: dict[int, Any] = {}
    with torch.no_grad():
        torch.set_default_device("cuda")
        model, pool = model_of(torch, name), None
        tokens, prompt = (torch.zeros(max(sizes), dtype=torch.long, device="cuda") for _ in range(2))
        logits = torch.zeros(max(sizes), model[-1].out_features)
        model(tokens[:1])
        cuda.empty_cache()
        before_bytes = cuda.memory_reserved()
        for size in sizes:
            model(tokens[:size])
            cuda.synchronize()
            cuda.empty_cache()
            graph = cuda.CUDAGraph()
            with cuda.graph(graph, pool=pool):
                logits[:size] = model(tokens[:size])
            pool, graphs[size] = graph.pool(), graph
        captured_bytes = cuda.memory_reserved() - before_bytes
        cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            size = draw.choice(sizes)
            graphs[size].replay()
            with borrow():
                tokens[:size].copy_(logits[:size].argmax(-1))
                tokens[:1].copy_(model(prompt[: draw.randrange(1, max(sizes))])[-1:].argmax(-1))
        found = {"captured": captured_bytes, "reserved": cuda.max_memory_reserved() - before_bytes}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
