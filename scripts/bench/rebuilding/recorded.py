"""Run a program on a virtual GPU: python recorded.py GPU SCRIPT [ARGS…], in a folder of its own.

GPU is a name, or a name and the bytes that the recorded program's allocator could have: "A100-40GB:41000000000".
Stacks of a memory history are kept to Python's frames, since symbols of C++ take minutes; nothing else is changed.
"""

import dataclasses
import functools
import runpy
import sys
from pathlib import Path

from stalloc.device import activate, find_gpu

name, _, memory = sys.argv[1].partition(":")
gpu = find_gpu(name)
activate("virtual", dataclasses.replace(gpu, total_bytes=int(memory)) if memory else gpu)
import torch

torch.cuda.memory._record_memory_history = functools.partial(torch.cuda.memory._record_memory_history, stacks="python")
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
