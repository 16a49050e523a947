"""What checks of torch under stalloc begin with: both devices of a virtual GPU are served, and a model to train."""

PROLOGUE = """
import dataclasses, gc, json, os, sys, threading
import stalloc
from stalloc.device import VirtualGPU, virtual
RUNTIME = stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=2 << 30, num_devices=2))
CONTROLLER = RUNTIME.controllers[0]
STATE = CONTROLLER.state
import torch
MIB = 1 << 20
def new(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
def show(*values):
    print(json.dumps(values))
"""
MODEL = """
import torch.nn.functional as F
torch.manual_seed(0)
layers = [torch.nn.Linear(512, 512, device="cuda") for _ in range(12)]
head = torch.nn.Linear(512, 1000, device="cuda")
def forward(x):
    for layer in layers:
        x = x + F.gelu(layer(x))
    return head(x)
"""
