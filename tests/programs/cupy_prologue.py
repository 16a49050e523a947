"""What checks of CuPy begin with: stalloc on two virtual GPUs, whose copies are made, and names for its parts."""

PROLOGUE = """
import dataclasses, gc, json, sys
import stalloc
from stalloc.device import VirtualGPU, virtual
RUNTIME = stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=1 << 30, num_devices=2, copy_limit_bytes=None))
CONTROLLER = RUNTIME.controllers[0]
STATE = CONTROLLER.state
import cupy as cp
MIB = 1 << 20
"""
