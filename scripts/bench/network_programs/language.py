"""Three training steps of a small language model of Hugging Face with random weights, then five tokens greedily, by
sampling and with beams: python language.py NAME [--precision fp32|bf16|fp16]. MODELS has the names.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers
from convolutional import PRECISIONS, train
from torch import Tensor

VOCABULARY, NEW_TOKENS = 8000, 5
WORDS = {"vocab_size": VOCABULARY}
DECODER = WORDS | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
T5 = {"d_model": 128, "d_ff": 256, "num_layers": 2, "decoder_start_token_id": 0}
PARTS = {"layers": 2, "ffn_dim": 128, "attention_heads": 4}
HEARING = {f"{part}_{what}": num for part in ("encoder", "decoder") for what, num in PARTS.items()}
HEARING |= {"d_model": 64, "max_target_positions": 64}
SIGNS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 4}
GROUPED = DECODER | {"num_key_value_heads": 2, "head_dim": 32}


def made(name: str, settings: str, **values: Any) -> Callable[[], Any]:
    """What makes a model of the library from its class's name and that of its settings."""
    return lambda: getattr(transformers, name)(getattr(transformers, settings)(**values))


MODELS: dict[str, Callable[[], Any]] = {
    "gpt_neox": made("GPTNeoXForCausalLM", "GPTNeoXConfig", num_hidden_layers=3, **DECODER, eos_token_id=0),
    "gemma2": made("Gemma2ForCausalLM", "Gemma2Config", num_hidden_layers=4, sliding_window=16, **GROUPED),
    "gemma3": made("Gemma3ForCausalLM", "Gemma3TextConfig", num_hidden_layers=6, sliding_window=16, **GROUPED),
    "mamba": made("MambaForCausalLM", "MambaConfig", **WORDS, hidden_size=64, num_hidden_layers=2, state_size=8),
    "t5": made("T5ForConditionalGeneration", "T5Config", **WORDS, **T5),
    "whisper": made("WhisperForConditionalGeneration", "WhisperConfig", **WORDS, **HEARING, **SIGNS),
}
"""Each model; the one that hears pads with token 0, and two end their texts with it."""


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(5, VOCABULARY, (rows, length)).cuda()


def generated(model: Any, inputs: dict[str, Tensor]) -> None:
    for how in ({"do_sample": False}, {"do_sample": True, "top_k": 20}, {"do_sample": False, "num_beams": 3}):
        if how.get("num_beams") and model.config.model_type == "mamba":
            continue  # which has no cache to reorder
        with torch.no_grad():
            print(how, tuple(model.generate(**inputs, max_new_tokens=NEW_TOKENS, **how).shape))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    args = parser.parse_args()
    model = MODELS[args.name]().cuda()
    hears = args.name == "whisper"

    def loss() -> Tensor:
        if hears:
            return model(input_features=torch.randn(2, 80, 3000, device="cuda"), labels=tokens(2, 20)).loss
        texts = tokens(4, 64)
        mask = torch.ones_like(texts)
        mask[0, 32:] = 0
        return model(input_ids=texts, attention_mask=mask, labels=texts.masked_fill(mask == 0, -100)).loss

    train(model, loss, args.precision)
    model.eval()
    dtype = PRECISIONS[args.precision]
    with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
        if hears:
            generated(model, {"input_features": torch.randn(2, 80, 3000, device="cuda")})
        else:
            texts = tokens(2, 7)
            generated(model, {"input_ids": texts, "attention_mask": torch.ones_like(texts)})


if __name__ == "__main__":
    main()
