"""A Hugging Face Llama of 0.6 billion parameters, made on the GPU, gradients clipped: python llama.py STEPS."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

SIZES = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 20, "num_attention_heads": 24}
config = LlamaConfig(**SIZES, num_key_value_heads=6, vocab_size=32000, use_cache=False)
with torch.device("cuda"):
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_cosine_schedule_with_warmup(optimizer, 2, 100)
for _ in range(int(sys.argv[1])):
    tokens = torch.randint(0, config.vocab_size, (4, 1024)).cuda()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
