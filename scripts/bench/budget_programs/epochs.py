"""Two epochs as people write them, each with a smaller last batch and an evaluation: python epochs.py NAME."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

NAME = sys.argv[1]
if "timm" in NAME:
    import timm
elif "diffusers" in NAME:
    from diffusers import DiTTransformer2DModel, UNet2DModel
else:
    import transformers

    if "peft" in NAME:
        from peft import LoraConfig, get_peft_model

FULL, BATCHES = 8, 6  #: rows of a batch, and batches of an epoch, the last of which has fewer rows
Made = tuple[nn.Module, Callable[[Any, int], Any]]
"""A model, and the loss of it for so many rows."""


def tokens(rows: int, length: int) -> Any:
    return torch.randint(0, 4000, (rows, length)).cuda()


def images(rows: int, side: int, channels: int = 3) -> Any:
    return torch.randn(rows, channels, side, side).cuda()


def of_timm(name: str, side: int) -> Made:
    def loss(model: Any, rows: int) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return nn.functional.cross_entropy(model(images(rows, side)), torch.randint(0, 100, (rows,)).cuda())

    return timm.create_model(name, num_classes=100), loss


def of_transformers(name: str, config: str, **sizes: Any) -> Any:
    return getattr(transformers, name)(getattr(transformers, config)(vocab_size=4000, **sizes))


def language_loss(model: Any, rows: int, length: int = 512) -> Any:
    words = tokens(rows, length)
    return model(input_ids=words, labels=words).loss


def llama() -> Made:
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8}
    model = of_transformers("LlamaForCausalLM", "LlamaConfig", **sizes, num_key_value_heads=4, use_cache=False)
    return model.to(torch.bfloat16), language_loss


def t5() -> Made:
    sizes = {"d_model": 512, "d_ff": 1024, "num_layers": 4, "num_heads": 8, "decoder_start_token_id": 0}
    model = of_transformers("T5ForConditionalGeneration", "T5Config", **sizes)
    return model, lambda model, rows: model(input_ids=tokens(rows, 256), labels=tokens(rows, 96)).loss


def bert() -> Made:
    """Under autocast, texts as long as the longest of the batch."""
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}

    def loss(model: Any, rows: int) -> Any:
        with torch.autocast("cuda", torch.float16):
            return language_loss(model, rows, 384 if rows == FULL else 256)

    return of_transformers("BertForMaskedLM", "BertConfig", **sizes), loss


def whisper() -> Made:
    sizes = {"d_model": 256, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024}
    signs = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

    def loss(model: Any, rows: int) -> Any:
        return model(input_features=torch.randn(rows, 80, 3000).cuda(), labels=tokens(rows, 128)).loss

    return of_transformers("WhisperForConditionalGeneration", "WhisperConfig", **sizes, **signs), loss


def lora() -> Made:
    model = of_transformers("GPT2LMHeadModel", "GPT2Config", n_embd=512, n_layer=6, n_head=8, use_cache=False)
    return get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)), language_loss


def unet() -> Made:
    down, up = ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D", "UpBlock2D")
    widths = (64, 128, 256)

    def loss(model: Any, rows: int) -> Any:
        noise, times = images(rows, 64), torch.randint(0, 1000, (rows,)).cuda()
        return nn.functional.mse_loss(model(noise, times).sample, torch.randn_like(noise))

    return UNet2DModel(sample_size=64, block_out_channels=widths, down_block_types=down, up_block_types=up), loss


def dit() -> Made:
    sizes = {"num_attention_heads": 6, "attention_head_dim": 64, "num_layers": 6, "sample_size": 32}

    def loss(model: Any, rows: int) -> Any:
        noise, times = images(rows, 32, 4), torch.randint(0, 1000, (rows,)).cuda()
        classes = torch.randint(0, 1000, (rows,)).cuda()
        return nn.functional.mse_loss(model(noise, timestep=times, class_labels=classes).sample, noise)

    return DiTTransformer2DModel(**sizes, in_channels=4, out_channels=4, num_embeds_ada_norm=1000), loss


MODELS: dict[str, Callable[[], Made]] = {
    "timm-convnext": lambda: of_timm("convnext_pico", 160),
    "timm-effnet": lambda: of_timm("efficientnet_b0", 160),
    "timm-vit": lambda: of_timm("vit_small_patch16_224", 224),
    "transformers-llama": llama,
    "transformers-t5": t5,
    "transformers-bert": bert,
    "transformers-whisper": whisper,
    "peft-lora": lora,
    "diffusers-unet": unet,
    "diffusers-dit": dit,
}


def main(name: str) -> None:
    model, loss = MODELS[name]()
    model = model.cuda()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for _ in range(2):
        model.train()
        for batch in range(BATCHES):
            loss(model, FULL if batch < BATCHES - 1 else FULL // 2 + 1).backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for batch in range(3):
                loss(model, FULL + 2 if batch < 2 else FULL - 1).item()


if __name__ == "__main__":
    main(NAME)
