"""Train a decoder-only transformer (Llama style) on synthetic tokens. Plain PyTorch: it knows nothing of stalloc.

python train_gpt.py --size 124m --steps 20
stalloc run train_gpt.py --size 124m --steps 20
"""

import argparse
import contextlib
import json
import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Shape of a model, and the sequence length and parameter type that it is trained with unless told otherwise."""

    num_layers: int
    num_heads: int
    dim: int
    hidden_dim: int
    vocab_size: int = 32000
    seq_len: int = 2048
    dtype: torch.dtype = torch.bfloat16
    tied_head: bool = False


SIZES = {
    "tiny": ModelSize(
        num_layers=2, num_heads=4, dim=64, hidden_dim=192,
        vocab_size=256, seq_len=64, dtype=torch.float32, tied_head=True,
    ),
    "124m": ModelSize(
        num_layers=12, num_heads=12, dim=768, hidden_dim=2048,
        vocab_size=50304, seq_len=1024, dtype=torch.float32, tied_head=True,
    ),
    "1b": ModelSize(num_layers=22, num_heads=32, dim=2048, hidden_dim=5632),
    "7b": ModelSize(num_layers=32, num_heads=32, dim=4096, hidden_dim=11008),
}  # fmt: skip


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq_len, dim = x.shape
        q, k, v = self.qkv(x).view(batch, seq_len, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)  # (B, H, S, D/H) each
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, seq_len, dim))


class FeedForward(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.dim, size.hidden_dim, bias=False)
        self.up = nn.Linear(size.dim, size.hidden_dim, bias=False)
        self.down = nn.Linear(size.hidden_dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(size.dim)
        self.attention = Attention(size)
        self.feed_forward_norm = RMSNorm(size.dim)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    def __init__(self, size: ModelSize, seq_len: int, use_checkpoint: bool) -> None:
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.embedding = nn.Embedding(size.vocab_size, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, size.vocab_size, bias=False)
        cos, sin = rotary_table(seq_len, size.dim // size.num_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last_of_residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * size.num_layers) ** 0.5 if last_of_residual else 0.02)
        if size.tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of `targets` (B, S) after `tokens` (B, S)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.use_checkpoint:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rotary_table(seq_len: int, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines (S, head_dim / 2) of the rotary positions."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of each head (B, H, S, D/H) against each other by the angle of the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).type_as(x)


def make_batch(generator: torch.Generator, batch: int, seq_len: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (B, S) on the CPU: counting from a random start by a random stride, a rule to learn."""
    start = torch.randint(vocab_size, (batch, 1), generator=generator)
    stride = torch.randint(1, 8, (batch, 1), generator=generator)
    tokens = (start + stride * torch.arange(seq_len + 1)) % vocab_size
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=1, help="sequences in a microbatch")
    parser.add_argument("--seq", type=int, help="tokens in a sequence (default: depends on the size)")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches in a step")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block's activations in backward")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16, keep parameters as they are")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the parameters (default: by size)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true", help="the same bits in every run, at some cost")
    parser.add_argument("--losses", metavar="FILE", help="write the loss of each step, as hexadecimal floats, to FILE")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its sums only with this set
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    size = SIZES[args.size]
    seq_len = args.seq or size.seq_len

    torch.set_default_dtype(getattr(torch, args.dtype) if args.dtype else size.dtype)
    with torch.device(args.device):  # parameters are made where they will live: no copy of 7B in host memory
        model = Transformer(size, seq_len, args.checkpoint)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{args.size}: {num_parameters / 1e6:.1f}M parameters, {args.batch} x {seq_len} tokens x {args.accumulate}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    autocast = torch.autocast(args.device, dtype=torch.bfloat16) if args.autocast else contextlib.nullcontext()
    losses: list[float] = []
    for step in range(args.steps):
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        step_loss = torch.zeros((), dtype=torch.float32, device=args.device)
        for _ in range(args.accumulate):
            tokens, targets = make_batch(generator, args.batch, seq_len, size.vocab_size)
            with autocast:
                loss = model(tokens.to(args.device), targets.to(args.device)) / args.accumulate
            loss.backward()
            step_loss += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        losses.append(step_loss.item())  # waits for the device, so the time below is that of the whole step
        print(f"step {step:3d}  loss {losses[-1]:.6f}  {(time.perf_counter() - started) * 1e3:.1f} ms", flush=True)

    if args.device == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(f"peak allocated {allocated / 2**30:.2f} GiB, reserved {reserved / 2**30:.2f} GiB")
    if args.losses:
        with open(args.losses, "w", encoding="utf-8") as file:
            json.dump([loss.hex() for loss in losses], file)


if __name__ == "__main__":
    main()
