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
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
        WhisperConfig,
        WhisperForConditionalGeneration,
    )

    if "peft" in NAME:
        from peft import LoraConfig, get_peft_model

FULL, BATCHES = 8, 6  #: rows of a batch, and batches of an epoch, the last of which has fewer rows


def tokens(rows: int, length: int, words: int = 4000) -> Any:
    return torch.randint(0, words, (rows, length)).cuda()


def images(rows: int, side: int, channels: int = 3) -> Any:
    return torch.randn(rows, channels, side, side).cuda()


def of_timm(name: str, side: int, **settings: Any) -> tuple[nn.Module, Callable[[Any, int], Any]]:
    model = timm.create_model(name, num_classes=100, **settings)

    def loss(model: Any, rows: int) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return nn.functional.cross_entropy(model(images(rows, side)), torch.randint(0, 100, (rows,)).cuda())

    return model, loss


def llama() -> tuple[nn.Module, Callable[[Any, int], Any]]:
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=4000, use_cache=False))

    def loss(model: Any, rows: int) -> Any:
        words = tokens(rows, 512)
        return model(input_ids=words, labels=words).loss

    return model.to(torch.bfloat16), loss


def t5() -> tuple[nn.Module, Callable[[Any, int], Any]]:
    sizes = {"d_model": 512, "d_ff": 1024, "num_layers": 4, "num_heads": 8, "vocab_size": 4000}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    return model, lambda model, rows: model(input_ids=tokens(rows, 256), labels=tokens(rows, 96)).loss


def bert() -> tuple[nn.Module, Callable[[Any, int], Any]]:
    """Under autocast, texts as long as the longest of the batch."""
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
    model = BertForMaskedLM(BertConfig(**sizes, vocab_size=4000))

    def loss(model: Any, rows: int) -> Any:
        words = tokens(rows, 384 if rows == FULL else 256)
        with torch.autocast("cuda", torch.float16):
            return model(input_ids=words, labels=words).loss

    return model, loss


def whisper() -> tuple[nn.Module, Callable[[Any, int], Any]]:
    sizes = {"d_model": 256, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4}
    model = WhisperForConditionalGeneration(
        WhisperConfig(**sizes, decoder_attention_heads=4, encoder_ffn_dim=1024, decoder_ffn_dim=1024, vocab_size=4000,
                      pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    )  # fmt: skip
    return (
        model,
        lambda model, rows: model(input_features=torch.randn(rows, 80, 3000).cuda(), labels=tokens(rows, 128)).loss,
    )


def lora() -> tuple[nn.Module, Callable[[Any, int], Any]]:
    """A GPT-2 of which adapters alone are trained."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=512, n_layer=6, n_head=8, vocab_size=4000, use_cache=False))
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))

    def loss(model: Any, rows: int) -> Any:
        words = tokens(rows, 512)
        return model(input_ids=words, labels=words).loss

    return model, loss


def unet() -> tuple[nn.Module, Callable[[Any, int], Any]]:
    model = UNet2DModel(
        sample_size=64,
        block_out_channels=(64, 128, 256),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )

    def loss(model: Any, rows: int) -> Any:
        noise, times = images(rows, 64), torch.randint(0, 1000, (rows,)).cuda()
        return nn.functional.mse_loss(model(noise, times).sample, torch.randn_like(noise))

    return model, loss


def dit() -> tuple[nn.Module, Callable[[Any, int], Any]]:
    model = DiTTransformer2DModel(num_attention_heads=6, attention_head_dim=64, num_layers=6, sample_size=32,
                                  in_channels=4, out_channels=4, num_embeds_ada_norm=1000)  # fmt: skip

    def loss(model: Any, rows: int) -> Any:
        noise, times = images(rows, 32, 4), torch.randint(0, 1000, (rows,)).cuda()
        classes = torch.randint(0, 1000, (rows,)).cuda()
        return nn.functional.mse_loss(model(noise, timestep=times, class_labels=classes).sample, noise)

    return model, loss


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[Any, int], Any]]]] = {
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
