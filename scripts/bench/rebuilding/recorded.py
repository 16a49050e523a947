"""Run a program on a virtual GPU: python recorded.py GPU SCRIPT [ARGS…], in a folder of its own.

Stacks of a memory history are kept to Python's frames, since symbols of C++ take minutes; nothing else is changed.
"""

import functools
import runpy
import sys
from pathlib import Path

from stalloc.device import activate, find_gpu

activate("virtual", find_gpu(sys.argv[1]))
import torch

torch.cuda.memory._record_memory_history = functools.partial(torch.cuda.memory._record_memory_history, stacks="python")
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
