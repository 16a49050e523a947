"""A Hugging Face Mixtral from its configuration, 30 training steps: python mixture_of_experts.py [STEPS].

The experts run as one batched product: which tokens go where is read from the device otherwise, and a virtual GPU
computes nothing that could be read.
"""

import sys

import torch
from transformers import MixtralConfig, MixtralForCausalLM

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
torch.manual_seed(0)
config = MixtralConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    num_local_experts=8,
    vocab_size=32000,
    use_cache=False,
    output_router_logits=True,
    experts_implementation="grouped_mm",
)
model = MixtralForCausalLM(config).to(torch.bfloat16).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(steps):
    tokens = torch.randint(0, config.vocab_size, (4, 512)).cuda()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}")
