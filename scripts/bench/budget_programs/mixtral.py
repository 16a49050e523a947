"""A Hugging Face Mixtral with eight experts, made on the GPU, all experts in one product: python mixtral.py STEPS."""

import sys

import torch
from transformers import MixtralConfig, MixtralForCausalLM

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
EXPERTS = {"num_local_experts": 8, "output_router_logits": True, "experts_implementation": "grouped_mm"}
config = MixtralConfig(**SIZES, **EXPERTS, num_key_value_heads=4, vocab_size=8000, use_cache=False)
with torch.device("cuda"):
    model = MixtralForCausalLM(config).to(torch.bfloat16).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(int(sys.argv[1])):
    tokens = torch.randint(0, config.vocab_size, (8, 1024)).cuda()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
