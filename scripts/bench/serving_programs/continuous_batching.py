"""Continuous batching of transformers, of a Llama of 8B parameters that were not trained."""

import torch
from llama_sizes import SIZES
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(**SIZES)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = LlamaForCausalLM._from_config(config, attn_implementation="paged|sdpa")
settings = GenerationConfig(max_new_tokens=8, eos_token_id=-1, pad_token_id=0, do_sample=False)
prompts = [[1 + number] * (20 + 13 * number) for number in range(12)]
outputs = model.eval().generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
assert len(outputs) == len(prompts)
