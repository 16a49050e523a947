"""Hugging Face's experts one by one, routed by data: python routed_experts.py mixtral|deepseek [STEPS].

Where tokens go is drawn on the processor anew in each layer and step, since a virtual GPU computes nothing that could
be read; an expert's operations are those of `transformers`, which runs a loop over the experts that have tokens too.
The DeepSeek has shared experts, and its experts take no more tokens than 1.25 times their share.
"""

import sys
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

CAPACITY = 1.25  # of DeepSeek's experts, times their share of the tokens
SKEW = 0.5

generator = torch.Generator().manual_seed(0)
name, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 30


def route(num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """(tokens, k) experts, some of which take more tokens than others."""
    liked = torch.softmax(SKEW * torch.randn(num_experts, generator=generator), 0)
    return torch.multinomial(liked.expand(num_tokens, num_experts), top_k, generator=generator)


def forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Of a layer's experts: what `transformers` does expert by expert, with tokens that are drawn."""
    result = torch.zeros_like(hidden_states)
    num_tokens, top_k = top_k_index.shape
    chosen = route(num_tokens, self.num_experts, top_k)
    capacity = int(CAPACITY * num_tokens * top_k / self.num_experts) if name == "deepseek" else num_tokens
    for expert in range(self.num_experts):
        tokens, position = (rows[:capacity].cuda() for rows in torch.where(chosen == expert))
        if not len(tokens):
            continue
        gate, up = nn.functional.linear(hidden_states[tokens], self.gate_up_proj[expert]).chunk(2, dim=-1)
        made = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
        result.index_add_(0, tokens, (made * top_k_weights[tokens, position, None]).to(result.dtype))
    return result


common: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "use_cache": False,
}
model: Any
if name == "mixtral":
    config = MixtralConfig(intermediate_size=2816, num_key_value_heads=4, num_local_experts=8, **common)
    model = MixtralForCausalLM(config)
else:
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            intermediate_size=2816,
            moe_intermediate_size=512,
            n_routed_experts=16,
            num_experts_per_tok=4,
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            num_key_value_heads=16,
            **common,
        )
    )
for module in model.modules():
    if hasattr(module, "num_experts") and hasattr(module, "gate_up_proj"):
        module.forward = forward.__get__(module)
model = model.to(torch.bfloat16).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(steps):
    tokens = torch.randint(0, 32000, (4, 512)).cuda()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}")
