"""The training loop that the networks beside this file share."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast computes in; the last with GradScaler."""
STEPS = 3


def train(model: nn.Module, loss: Callable[[], Tensor], precision: str) -> None:
    """Steps of AdamW with clipped gradients."""
    dtype = PRECISIONS[precision]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    model.train()
    for _ in range(STEPS):
        with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
            value = loss()
        optimizer.zero_grad()
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
