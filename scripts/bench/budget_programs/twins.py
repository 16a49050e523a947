"""The programs of the bench on the CPU, cut in width and depth: trained as they are, and recomputed.

Run with the number of random choices of what is kept, beside nothing and attention. Prints one JSON object: of each
program how many trainings of three steps had losses, gradients, buffers and random numbers equal to the last bit, how
many differed, and what was raised in their place. Programs of `transformers` are left out where it is not installed.
"""

import contextlib
import importlib.util
import json
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalloc import device

device.activate("virtual")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import stalloc

ROOT = Path(__file__).resolve().parents[3]
REAL = ROOT / "tests" / "programs" / "real"
sys.path += [str(ROOT / "examples"), str(REAL)]
import train_gpt

torch.set_num_threads(1)
STEPS = 3
Made = tuple[nn.Module, Callable[[], Tensor], bool]
"""A model, the loss of a batch that is drawn, and whether it is computed under autocast."""


def gpt(size: str, *, autocast: bool = False) -> Made:
    whole = train_gpt.SIZES[size]
    cut = train_gpt.ModelSize(
        num_layers=4, num_heads=4, dim=64, hidden_dim=160, vocab_size=128, dtype=whole.dtype, tied_head=whole.tied_head
    )
    model = train_gpt.Transformer(cut, 16, False).to(cut.dtype)
    return model, lambda: model(*torch.randint(128, (2, 2, 16))), autocast


def of_script(name: str) -> dict[str, Any]:
    argv, sys.argv = sys.argv, [name, "0"]
    with contextlib.redirect_stdout(sys.stderr):
        found = runpy.run_path(str(REAL / name))
    sys.argv = argv
    return found


def resnet() -> Made:
    """`resnet.py`: batch normalization, changes in place, channels last, autocast."""
    block = of_script("resnet.py")["Bottleneck"]
    layers = [nn.Conv2d(3, 16, 3), block(16, 8, 1), block(32, 8, 1), block(32, 8, 2), block(32, 8, 1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model = model.to(memory_format=torch.channels_last)
    return model, lambda: F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.randint(10, (4,))), True


def unet() -> Made:
    model = of_script("diffusion_unet.py")["UNet"](32, (1, 2, 2))

    def loss() -> Tensor:
        noise = torch.randn(2, 3, 16, 16)
        return F.mse_loss(model(torch.rand(2, 3, 16, 16) + noise, torch.randint(1000, (2,))), noise)

    return model, loss, True


def fsdp2() -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformer_block import Block

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(*(Block(64) for _ in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*model, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return model, lambda: model(torch.randn(2, 16, 64)).square().mean(), False


def of_transformers(name: str, task: str, **more: Any) -> Any:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return getattr(transformers, f"{name}For{task}")(getattr(transformers, f"{name}Config")(**sizes, **more))


def language_model(name: str, **more: Any) -> Made:
    """In bfloat16."""
    model = of_transformers(name, "CausalLM", vocab_size=64, **more).to(torch.bfloat16).train()

    def loss() -> Tensor:
        tokens = torch.randint(64, (2, 16))
        return model(input_ids=tokens, labels=tokens).loss

    return model, loss, False


def llama() -> Made:
    return language_model("Llama", attention_dropout=0.1)


def mixtral() -> Made:
    experts = {"num_local_experts": 4, "output_router_logits": True}
    return language_model("Mixtral", num_key_value_heads=2, use_cache=False, **experts)


def vit() -> Made:
    sizes = {"image_size": 32, "patch_size": 8, "num_labels": 10}
    model = of_transformers("ViT", "ImageClassification", hidden_dropout_prob=0.1, **sizes).train()
    return model, lambda: model(pixel_values=torch.rand(4, 3, 32, 32), labels=torch.randint(10, (4,))).loss, True


PROGRAMS: dict[str, Callable[[], Made]] = {
    "gpt 124m": lambda: gpt("124m"),
    "gpt 124m, autocast": lambda: gpt("124m", autocast=True),
    "gpt 1b": lambda: gpt("1b"),
    "gpt 7b": lambda: gpt("7b"),
    "Llama (Hugging Face)": llama,
    "Mixtral (Hugging Face)": mixtral,
    "ViT (Hugging Face), dropout, autocast": vit,
    "ResNet-50, autocast": resnet,
    "diffusion U-Net, autocast": unet,
    "FSDP2": fsdp2,
}


def train(make: Callable[[], Made], options: dict[str, Any] | None) -> list[Tensor]:
    """Losses and gradients of each step, and in the end parameters, buffers and a random number."""
    torch.manual_seed(1)
    model, loss_of, autocast = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options is not None:
        stalloc.checkpoint(model, **options)
    found = []
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of()
        loss.backward()
        gradients = [_own(one.grad).clone() for one in model.parameters() if one.grad is not None]
        assert len(gradients) > STEPS
        found += [loss.detach(), *gradients]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(_own(one.detach()) for one in (*model.parameters(), *model.buffers())), torch.rand(1)]


def _own(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def compared(name: str, num_choices: int) -> dict[str, Any]:
    make, chosen = PROGRAMS[name], random.Random(name)
    expected = train(make, None)
    found: dict[str, Any] = {"equal": 0, "differs": 0, "raised": []}
    kept: list[dict[str, Any]] = [{}, {"policy": "keep-attention"}]
    kept += [{"keep": chosen.sample(range(120), chosen.randrange(1, 90))} for _ in range(num_choices)]
    for options in kept:
        try:
            made = train(make, options)
        except stalloc.StallocError as error:
            found["raised"].append(str(error))
            continue
        same = len(made) == len(expected) and all(map(torch.equal, made, expected))
        found["equal" if same else "differs"] += 1
    return found


if __name__ == "__main__":
    has_transformers = importlib.util.find_spec("transformers") is not None
    names = [name for name in PROGRAMS if has_transformers or "Hugging Face" not in name]
    print(json.dumps({name: compared(name, int(sys.argv[1])) for name in names}))
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
