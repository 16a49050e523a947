"""A Hugging Face ViT-Base with dropout, under autocast with a gradient scaler: python vit.py STEPS."""

import sys

import torch
from transformers import ViTConfig, ViTForImageClassification

with torch.device("cuda"):
    model = ViTForImageClassification(ViTConfig(hidden_dropout_prob=0.1, num_labels=1000)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
for _ in range(int(sys.argv[1])):
    images, labels = torch.rand(32, 3, 224, 224).cuda(), torch.zeros(32, dtype=torch.int64).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(pixel_values=images, labels=labels).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
