"""Two training steps of a convolutional network: python convolutional.py NAME [--autocast]. NETWORKS has the names.

The networks of torchvision have random weights; the others are written here, as their papers draw them. The training
loop is that of the programs beside this file.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def twice(num_in: int, num_out: int, dimensions: int) -> nn.Sequential:
    """Two convolutions with batch normalisation, the blocks of a U-Net (Ronneberger et al., 2015)."""
    convolution, norm = (nn.Conv2d, nn.BatchNorm2d) if dimensions == 2 else (nn.Conv3d, nn.BatchNorm3d)
    layers: list[nn.Module] = []
    for channels in (num_in, num_out):
        layers += [convolution(channels, num_out, 3, padding=1, bias=False), norm(num_out), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions, with skips; in two or three dimensions."""

    def __init__(self, widths: tuple[int, ...], num_in: int, num_classes: int, dimensions: int) -> None:
        super().__init__()
        self.pool: Callable[[Tensor, int], Tensor] = F.max_pool2d if dimensions == 2 else F.max_pool3d
        transposed = nn.ConvTranspose2d if dimensions == 2 else nn.ConvTranspose3d
        self.down = nn.ModuleList(twice(a, b, dimensions) for a, b in zip((num_in, *widths), widths, strict=False))
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.up = nn.ModuleList(transposed(a, b, 2, stride=2) for a, b in pairs)
        self.join = nn.ModuleList(twice(2 * b, b, dimensions) for _, b in pairs)
        self.head = (nn.Conv2d if dimensions == 2 else nn.Conv3d)(widths[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for at, block in enumerate(self.down):
            x = block(self.pool(x, 2) if at else x)
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            x = join(torch.cat((skip, up(x)), dim=1))
        return self.head(x)


class Separable(nn.Sequential):
    """A depthwise convolution and one of 1x1 (MobileNet, Howard et al., 2017)."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        depthwise = nn.Conv2d(num_in, num_in, 3, stride, 1, groups=num_in, bias=False), nn.BatchNorm2d(num_in)
        pointwise = nn.Conv2d(num_in, num_out, 1, bias=False), nn.BatchNorm2d(num_out)
        super().__init__(*depthwise, nn.ReLU6(inplace=True), *pointwise, nn.ReLU6(inplace=True))


def mobilenet_v1() -> nn.Module:
    widths = (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024)
    first = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(inplace=True)]
    pairs = zip((32, *widths), widths, strict=False)
    body = [Separable(a, b, 2 if at in (1, 3, 5, 11) else 1) for at, (a, b) in enumerate(pairs)]
    return nn.Sequential(*first, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000))


def dcgan_generator() -> nn.Module:
    """The generator of DCGAN for images of 64x64 (Radford et al., 2015)."""
    widths, layers = (512, 256, 128, 64), []
    for at, (a, b) in enumerate(zip((100, *widths), widths, strict=False)):
        layers += [nn.ConvTranspose2d(a, b, 4, 2 if at else 1, 1 if at else 0, bias=False)]
        layers += [nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh())


def of_torchvision(name: str, **settings: Any) -> nn.Module:
    from torchvision.models import get_model

    return get_model(name, weights=None, **settings)


Made = tuple[nn.Module, tuple[int, ...]]
NETWORKS: dict[str, Callable[[], Made]] = {
    "resnet18": lambda: (of_torchvision("resnet18"), (32, 3, 224, 224)),
    "resnet50": lambda: (of_torchvision("resnet50"), (16, 3, 224, 224)),
    "vgg16": lambda: (of_torchvision("vgg16"), (8, 3, 224, 224)),
    "densenet121": lambda: (of_torchvision("densenet121"), (8, 3, 224, 224)),
    "efficientnet_b0": lambda: (of_torchvision("efficientnet_b0"), (32, 3, 224, 224)),
    "convnext_tiny": lambda: (of_torchvision("convnext_tiny"), (16, 3, 224, 224)),
    "mobilenet_v1": lambda: (mobilenet_v1(), (32, 3, 224, 224)),
    "mobilenet_v2": lambda: (of_torchvision("mobilenet_v2"), (32, 3, 224, 224)),
    "regnet": lambda: (of_torchvision("regnet_y_1_6gf"), (16, 3, 224, 224)),
    "unet128": lambda: (UNet((64, 128, 256, 512, 1024), 3, 2, 2), (2, 3, 128, 128)),
    "unet256": lambda: (UNet((64, 128, 256, 512, 1024), 3, 2, 2), (2, 3, 256, 256)),
    "unet512": lambda: (UNet((64, 128, 256, 512, 1024), 3, 2, 2), (4, 3, 512, 512)),
    "unet3d": lambda: (UNet((16, 32, 64, 128), 1, 3, 3), (1, 1, 64, 64, 64)),
    "dcgan": lambda: (dcgan_generator(), (64, 100, 1, 1)),
    "deeplab": lambda: (of_torchvision("deeplabv3_resnet50", weights_backbone=None), (4, 3, 320, 320)),
    "retinanet": lambda: (of_torchvision("retinanet_resnet50_fpn", weights_backbone=None), (2, 3, 512, 512)),
    "resnet18_small": lambda: (of_torchvision("resnet18"), (128, 3, 32, 32)),
}
"""What makes each network, with the shape of its input."""


def loss_of(network: nn.Module, name: str, x: Tensor) -> Tensor:
    if name == "retinanet":
        box = torch.tensor([[10.0, 20.0, 200.0, 300.0]], device=x.device)
        target = {"boxes": box, "labels": torch.ones(1, dtype=torch.long, device=x.device)}
        losses: dict[str, Tensor] = network(list(x), [target] * len(x))
        return torch.stack(list(losses.values())).sum()
    scores = network(x)
    return (scores["out"] if name == "deeplab" else scores).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=NETWORKS)
    parser.add_argument("--autocast", action="store_true", help="float16 with GradScaler")
    args = parser.parse_args()
    network, shape = NETWORKS[args.name]()
    network.cuda().train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=args.autocast)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(shape, device="cuda")
        with torch.autocast("cuda", torch.float16, enabled=args.autocast):
            loss = loss_of(network, args.name, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    main()


PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast computes in; the last with GradScaler."""
STEPS = 3


def train(model: nn.Module, loss: Callable[[], Tensor], precision: str) -> None:
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
