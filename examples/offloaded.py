"""Train the transformer of train_gpt.py with its layers and its optimizer's state in host memory, for six steps.

stalloc record --ops --device virtual --gpu RTX-4090 -o offloaded.trace.npz offloaded.py
stalloc report offloaded.trace.npz
"""

import torch
from train_gpt import SIZES, Transformer, make_batch

import stalloc

STEPS, BATCH = 6, 4


def main() -> None:
    size = SIZES["124m"]
    generator = torch.Generator().manual_seed(0)
    with torch.device("cuda"):
        model = Transformer(size, size.seq_len, use_checkpoint=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    stalloc.page_optimizer(optimizer)
    stalloc.stream_layers(model, window=2)
    for _ in range(STEPS):
        tokens, targets = make_batch(generator, BATCH, size.seq_len, size.vocab_size)
        model(tokens.cuda(), targets.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
