"""What the programs of this folder train: a small transformer, a small convolutional network, and their batches."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 8192


class Block(nn.Module):
    """Attention and a feed-forward layer: (N, T, width) -> (N, T, width)."""

    def __init__(self, width: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        num, length, width = x.shape
        heads = self.qkv(self.before_attention(x)).view(num, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(num, length, width)
        x = x + self.mix(mixed)
        return x + self.feed(self.before_feed(x))


class Transformer(nn.Module):
    """A language model: tokens (N, T) -> logits (N, T, VOCABULARY), or the loss if it is given targets."""

    def __init__(self, width: int = 256, num_blocks: int = 4, *, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.recompute = recompute

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ConvNet(nn.Module):
    """A classifier: (N, 3, H, W) -> (N, num_classes)."""

    def __init__(self, width: int = 32, num_stages: int = 4, num_classes: int = 1000) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        channels = 3
        for stage in range(num_stages):
            wide = width << stage
            stages += [nn.Conv2d(channels, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()]
            stages += [nn.Conv2d(wide, wide, 3, 2, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()]
            channels = wide
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(images).mean((2, 3)))


def tokens(num: int = 8, length: int = 256, device: str = "cuda") -> Tensor:
    return torch.randint(0, VOCABULARY, (num, length)).to(device)


def images(num: int = 32, size: int = 96) -> Tensor:
    return torch.empty(num, 3, size, size).cuda()


def new_training(**options: int | bool) -> tuple[Transformer, torch.optim.Optimizer]:
    model = Transformer(**options).cuda()  # type: ignore[arg-type]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch, batch)
    loss.backward()
    update(optimizer)
    return loss


def update(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
