"""Three training steps of a vision transformer, or of a convolutional network written by hand:
python vision.py NAME [--precision fp32|bf16|fp16]. NETWORKS has the names.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from convolutional import PRECISIONS, UNet, mobilenet_v1, train
from torch import Tensor, nn

NUM_CLASSES = 10


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm (Dosovitskiy et al., 2020)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, places, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, places, 3, self.num_heads, width // self.num_heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, places, width))
        return x + self.perceptron(self.norms[1](x))


class VisionTransformer(nn.Module):
    """Patches of 16x16 as a convolution, six blocks, the class token's scores."""

    def __init__(self, width: int = 192, num_heads: int = 3, num_blocks: int = 6, side: int = 224) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (side // 16) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), dim=1) + self.places
        return self.head(self.blocks(x)[:, 0])


def of_transformers(name: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(num_labels=NUM_CLASSES, **settings)
    return getattr(transformers, f"{name}ForImageClassification")(config)


SMALL = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
WINDOWS = {"embed_dim": 48, "depths": [1, 1, 2, 1], "num_heads": [3, 6, 12, 24]}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mobilenet_v1": (mobilenet_v1, (8, 3, 224, 224)),
    "unet3d": (lambda: UNet((16, 32, 64, 128), 1, NUM_CLASSES, 3), (1, 1, 48, 48, 48)),
    "vit_by_hand": (VisionTransformer, (8, 3, 224, 224)),
    "vit": (lambda: of_transformers("ViT", **SMALL), (8, 3, 224, 224)),
    "deit": (lambda: of_transformers("DeiT", **SMALL), (8, 3, 224, 224)),
    "swin": (lambda: of_transformers("Swin", **WINDOWS), (8, 3, 224, 224)),
}
"""What makes each network, and the shape of its input."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=NETWORKS)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    args = parser.parse_args()
    make, shape = NETWORKS[args.name]
    network = make().cuda()

    def loss() -> Tensor:
        found = network(torch.randn(shape, device="cuda"))
        scores = getattr(found, "logits", found)
        classes = torch.randint(0, NUM_CLASSES, (shape[0], *scores.shape[2:]), device="cuda")
        print(f"right: {(scores.argmax(1) == classes).float().mean().item():.0%}")
        return F.cross_entropy(scores, classes)

    train(network, loss, args.precision)


if __name__ == "__main__":
    main()
