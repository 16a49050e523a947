"""What a program notices of the values that the virtual GPU computes: no request, no dispatch, no other function."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch")

_PROLOGUE = """
import json, sys
from stalloc.device import VirtualGPU, virtual
virtual.activate(VirtualGPU(name="Test GPU", total_bytes=8 << 30, compute_capability=(8, 0)))
import torch
"""

_NOTHING_ADDED = """
import json, sys
from stalloc.device import VirtualGPU, virtual
if sys.argv[1] == "without":
    virtual.follow_values = lambda *_: None  # the virtual GPU as it would be
virtual.activate(VirtualGPU(total_bytes=8 << 30))
import torch
import torch.nn.functional as F
torch.cuda.memory._record_memory_history(max_entries=100000, stacks="python")
{program}
events = torch.cuda.memory._snapshot()["device_traces"][0]
print(json.dumps([[event["action"], event["size"]] for event in events]))
"""

_TRAINING = """
model = torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.Linear(32, 100)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, 100, (4, 16)).cuda()
for step in range(3):
    positions = torch.arange(16, device="cuda")
    mask = (positions[None] <= positions[:, None]) & (tokens[:, None] >= 0)
    scores = torch.randn(4, 16, 16, device="cuda").masked_fill(~mask, float("-inf")).softmax(-1)
    logits = scores @ model(tokens)
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=1).backward()
    optimizer.step()
    optimizer.zero_grad()
    lengths = (tokens != 0).sum(-1)
    counts = torch.bincount(tokens.flatten(), minlength=100)
    order = counts.argsort(descending=True)[:5]
    is_even = order % 2 == 0
    is_even.any()
"""
_INFERENCE = """
with torch.inference_mode():
    tokens = torch.ones(2, 8, dtype=torch.long, device="cuda")
    places = (tokens.cumsum(-1) - 1).masked_fill(tokens == 0, 1)
    past = torch.zeros(2, 32, 16, device="cuda")
    for step in range(8):
        past.index_copy_(1, places[0, step:step + 1], torch.randn(2, 1, 16, device="cuda"))
        picked = past.argmax(-1).clone()
        tokens = torch.cat([tokens, picked[:, :1]], -1).contiguous()
"""


_SEEN = (
    _PROLOGUE
    + """
from torch.utils._python_dispatch import TorchDispatchMode
class Seen(TorchDispatchMode):
    names = []
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))
count = torch.zeros((), dtype=torch.long, device="cuda")
with Seen() as seen:
    count.add_(1)
    other = count + count
    other.item()
    torch.full((2,), 3, device="cuda")
print(json.dumps([seen.names, count.item(), other.item()]))
"""
)


def test_dispatch_modes_of_the_program_do_not_see_what_the_host_computes(run_checks: Any) -> None:
    assert run_checks(_SEEN) == [["add_", "add", "_local_scalar_dense", "full"], 1, 2]


@pytest.mark.parametrize("program", [_TRAINING, _INFERENCE], ids=["training", "inference"])
def test_no_request_is_added(run_checks: Any, program: str) -> None:
    source = _NOTHING_ADDED.replace("{program}", textwrap.dedent(program))
    assert run_checks(source, "with") == run_checks(source, "without")


_COMPILED = (
    _PROLOGUE
    + """
import pathlib
source = "def scripted(x: torch.Tensor):\\n    return torch.arange(3, device=x.device) + torch.sum(x)\\n"
pathlib.Path(sys.argv[1]).write_text("import torch\\n" + source)
sys.path.insert(0, str(pathlib.Path(sys.argv[1]).parent))
import scripted

def count(x):
    x = torch.nn.functional.pad(x, (0, 1), value=9)
    return (x[None] == torch.arange(4, device="cuda")[:, None]).any(-1).sum()

import torch._dynamo
x = torch.arange(3, device="cuda")
breaks = torch._dynamo.explain(count)(x).graph_break_count
compiled = torch.compile(count, backend="eager", fullgraph=True)(x).item()
import pickle
print(json.dumps([list(torch.jit.script(scripted.scripted)(x).shape), breaks, compiled,
                  pickle.loads(pickle.dumps(torch.sum)) is torch.sum]))
"""
)


def test_scripts_compilers_and_pickles_find_the_functions_of_torch(run_checks: Any, tmp_path: Path) -> None:
    assert run_checks(_COMPILED, str(tmp_path / "scripted.py")) == [[3], 0, 3, True]
