"""A Hugging Face Llama from its configuration, 30 training steps: python llama.py [STEPS]."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    vocab_size=32000,
    use_cache=False,
)
model = LlamaForCausalLM(config).to(torch.bfloat16).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(steps):
    tokens = torch.randint(0, config.vocab_size, (4, 1024)).cuda()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}")
