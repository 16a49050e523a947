"""A diffusion U-Net with attention and an averaged copy of its weights, 30 steps: python diffusion_unet.py [STEPS]."""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions, the time (N, 256) added between them: (N, in, H, W) -> (N, out, H, W)."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, out), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(256, out)
        self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """Self-attention over the pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(32, channels), nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, 3, 4, c // 4, h * w).transpose(-1, -2).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(n, c, h, w)
        return x + self.out(mixed)


class UNet(nn.Module):
    """(N, 3, H, W) noisy images and (N,) times -> the noise."""

    def __init__(self, width: int = 128, factors: tuple[int, ...] = (1, 2, 2, 4)) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 256))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        channels, kept = width, [width]
        for level, factor in enumerate(factors):
            for _ in range(2):
                attention = Attention(width * factor) if level == 2 else nn.Identity()
                self.down.append(nn.ModuleList([Residual(channels, width * factor), attention]))
                channels = width * factor
                kept.append(channels)
        self.middle = Residual(channels, channels)
        for level, factor in reversed(list(enumerate(factors))):
            for _ in range(2):
                attention = Attention(width * factor) if level == 2 else nn.Identity()
                self.up.append(nn.ModuleList([Residual(channels + kept.pop(), width * factor), attention]))
                channels = width * factor
        self.last = nn.Sequential(nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(64, device=x.device) * (-math.log(1e4) / 64))
        angles = time[:, None].float() * rates
        code = self.time(torch.cat((angles.sin(), angles.cos()), dim=1))
        x = self.first(x)
        kept = []
        for i, (residual, attention) in enumerate(self.down):
            x = attention(residual(x, code))
            kept.append(x)
            if i % 2 == 1 and i + 1 < len(self.down):
                x = F.avg_pool2d(x, 2)
        x = self.middle(x, code)
        for i, (residual, attention) in enumerate(self.up):
            x = attention(residual(torch.cat((x, kept.pop()), dim=1), code))
            if i % 2 == 1 and i + 1 < len(self.up):
                x = F.interpolate(x, scale_factor=2.0)
        return self.last(x)


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
torch.manual_seed(0)
model, averaged = UNet().cuda(), UNet().cuda().requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(steps):
    images = torch.rand(16, 3, 64, 64).cuda()
    noise = torch.randn_like(images)
    time = torch.randint(0, 1000, (16,)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.mse_loss(model(images + noise, time), noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, weight in zip(averaged.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 0.001)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}")
