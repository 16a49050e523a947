"""Random numbers drawn on the virtual GPU: others stand for them, so that what they choose is about as large."""

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch")

_PROGRAM = """
import json
from stalloc.device import VirtualGPU, virtual
virtual.activate(VirtualGPU(name="Test GPU", total_bytes=8 << 30, compute_capability=(8, 0)))
import torch

def of_the_host():
    return torch.manual_seed(0) and torch.rand(3).tolist()

before = of_the_host()
torch.manual_seed(0)
order, masked = torch.randperm(100, device="cuda"), torch.rand(8, 512, device="cuda") < 0.15
kept = len(order[order < 30])
tokens = torch.randn(8, 512, 4, device="cuda")[masked]
different = torch.unique(torch.randint(5, 9, (200,), device="cuda")).tolist()
print(json.dumps({
    "kept": kept, "tokens": len(tokens), "different": different, "host": before == torch.rand(3).tolist(),
    "decisions": len(virtual.findings()["decisions"]),
}))
"""


def test_numbers_drawn_on_the_gpu_choose_about_as_many_as_on_a_real_one(run_checks: Any) -> None:
    found = run_checks(_PROGRAM)
    assert found["kept"] == 30
    assert 0.12 < found["tokens"] / 4096 < 0.18
    assert found["different"] == [5, 6, 7, 8]
    assert found["host"], "the host's own random numbers are those without a GPU"
    assert found["decisions"] == 3, "all of them are named"


_CHOSEN = """
import json, sys
from stalloc.device import VirtualGPU, virtual
virtual.activate(VirtualGPU(name="Test GPU", total_bytes=8 << 30, compute_capability=(8, 0)))
import torch

head, table = torch.nn.Linear(16, 5000, device="cuda"), torch.nn.Embedding(5000, 16, device="cuda")
choose = {
    "greedy": lambda scores: scores.argmax(-1),
    "sampled": lambda scores: torch.multinomial(scores.softmax(-1), 1).squeeze(1),
    "largest": lambda scores: scores.max(dim=-1).indices,
    "best of two beams": lambda scores: (scores.flatten().topk(2).indices % 5000),
}[sys.argv[1]]
tokens, end = torch.randint(5, 5000, (2, 4)).cuda(), torch.zeros(1, dtype=torch.long, device="cuda")
with torch.no_grad():
    while tokens.shape[1] < 9:
        tokens = torch.cat([tokens, choose(head(table(tokens))[:, -1])[:, None]], dim=-1)
        if torch.isin(tokens[:, -1], end).all():
            break
    scores = head(table(tokens))[0, -1].softmax(-1)
    one = scores.argmax().item()
    each = torch.func.vmap(lambda row: row.max(dim=0).indices)(head(table(tokens[:, 0]))).shape
    apart = [len(torch.unique(picked)) for picked in (torch.multinomial(scores, 50), scores.topk(60)[1])]
text = tokens[0]
print(json.dumps({
    "shape": list(tokens.shape), "text": len(text[text != 0]), "largest": int(tokens.max()),
    "apart": apart, "one": one, "each": list(each), "decisions": len(virtual.findings()["decisions"]),
}))
"""


@pytest.mark.parametrize("how", ["greedy", "sampled", "largest", "best of two beams"])
def test_a_token_that_the_model_would_have_chosen_is_neither_an_end_nor_padding(run_checks: Any, how: str) -> None:
    found = run_checks(_CHOSEN, how)
    assert found["shape"] == [2, 9]
    assert found["text"] == 9
    assert found["largest"] < 5000
    assert found["apart"] == [50, 60], "no place is chosen twice"
    assert 0 < found["one"] < 5000
    assert found["decisions"] == 4, "all of them are named"
