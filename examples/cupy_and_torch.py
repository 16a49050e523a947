"""CuPy prepares images, PyTorch learns from them, CuPy keeps the score: one process, no copy between the two.

    python cupy_and_torch.py --steps 50
    stalloc run cupy_and_torch.py --steps 50

Arrays cross by DLPack in both directions. Without stalloc each library keeps a pool of its own.
"""

import argparse
import time

import cupy as cp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

NUM_CLASSES = 10


def prepare(photographs: np.ndarray, flip: bool) -> cp.ndarray:
    """Bytes (N, H, W) on the CPU to normalised patches (N, H/8 * W/8, 64) of floats on the GPU."""
    images = cp.asarray(photographs).astype(cp.float32) / 255
    if flip:
        images = images[:, :, ::-1]
    mean = images.mean(axis=(1, 2), keepdims=True)
    deviation = cp.sqrt(((images - mean) ** 2).mean(axis=(1, 2), keepdims=True))
    images = (images - mean) / (deviation + 1e-5)
    count, height, width = images.shape
    patches = images.reshape(count, height // 8, 8, width // 8, 8).transpose(0, 1, 3, 2, 4)
    return cp.ascontiguousarray(patches).reshape(count, -1, 64)


class PatchMixer(nn.Module):
    """A small classifier: patches are embedded, mixed with each other and by themselves, then averaged."""

    def __init__(self, num_patches: int, dim: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(64, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(num_layers))
        self.across = nn.ModuleList(nn.Linear(num_patches, num_patches) for _ in range(num_layers))
        self.within = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, NUM_CLASSES)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        x = self.embed(patches)
        for norm, across, within in zip(self.norms, self.across, self.within, strict=True):
            x = x + across(norm(x).transpose(1, 2)).transpose(1, 2)
            x = x + F.gelu(within(x))
        return self.head(x.mean(dim=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--size", type=int, default=128, help="pixels of a side, a multiple of 8")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    model = PatchMixer((args.size // 8) ** 2, args.dim, args.layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    confusion = cp.zeros((NUM_CLASSES, NUM_CLASSES), dtype=cp.float32)
    classes = cp.arange(NUM_CLASSES)
    for step in range(args.steps):
        started = time.perf_counter()
        labels = rng.integers(0, NUM_CLASSES, size=args.batch)
        brightness = (labels * 20 + 20)[:, None, None]  # noise under a bar whose width tells the class
        photographs = rng.integers(0, 60, size=(args.batch, args.size, args.size)) + np.where(
            np.arange(args.size) < (labels[:, None, None] + 1) * args.size // (NUM_CLASSES + 1), brightness, 0
        )
        patches = torch.from_dlpack(prepare(photographs.astype(np.uint8), flip=step % 2 == 1))
        targets = torch.from_numpy(labels).cuda()

        optimizer.zero_grad(set_to_none=True)
        logits = model(patches)
        loss = F.cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()

        scores = cp.from_dlpack(logits.detach())
        predicted = scores.argmax(axis=1)[:, None] == classes
        actual = cp.asarray(labels)[:, None] == classes
        confusion = 0.9 * confusion + (actual[:, :, None] & predicted[:, None, :]).sum(axis=0, dtype=cp.float32)
        if step % 10 == 9 or step == args.steps - 1:
            hit_rate = float(cp.trace(confusion) / cp.maximum(confusion.sum(), 1))
            milliseconds = (time.perf_counter() - started) * 1e3
            print(f"step {step:3d}  loss {loss.item():.4f}  right {hit_rate:.3g}  {milliseconds:.1f} ms", flush=True)

    pool = cp.get_default_memory_pool()
    print(f"torch reserved {torch.cuda.max_memory_reserved() / 2**20:.1f} MiB at its peak")
    print(f"CuPy's default pool holds {pool.total_bytes() / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
