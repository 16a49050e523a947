"""A Hugging Face ViT-B/16 from its configuration, 30 steps under autocast: python vision_transformer.py [STEPS]."""

import sys

import torch
from transformers import ViTConfig, ViTForImageClassification

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
torch.manual_seed(0)
model = ViTForImageClassification(ViTConfig(num_labels=1000)).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(steps):
    images, labels = torch.rand(16, 3, 224, 224).cuda(), torch.randint(0, 1000, (16,)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(pixel_values=images, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}")
