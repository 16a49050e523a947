"""What of a model is recomputed: its repeated blocks, or rows of its forward pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_programs import told_by_file

pytestmark = pytest.mark.usefixtures("cuda_torch")

PROGRAM = Path(__file__).parent / "programs" / "recomputation.py"

BLOCKS = """
import json
from stalloc import device
device.activate("virtual")
import torch
from torch import nn
from stalloc.techniques.repeated_blocks import find_blocks, why_not

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.cross = Block(), Block()

def stage(n):
    return nn.Sequential(*[Block() for _ in range(n)])

def small():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())

def names(model):
    return [block.name for block in find_blocks(model)]

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = stage(2)

class Levels(nn.Module):
    def __init__(self):
        super().__init__()
        self.of = nn.ModuleList([nn.ModuleDict({"one": Block(), "two": Deep()}) for _ in range(2)])

class Shelves(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.ModuleDict({"in": nn.Linear(4, 4)}) for name in ("first", "second")})

class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.down = Block(), nn.Linear(4, 4)

class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.known, self.loose = nn.ModuleList([Block()]), [Block(), Block()]
        self.again, self.named, self.numbers = [self.known[0]], {"last": Block()}, [1, 2]
        self.loose[0].owner = [self]

compiled, hooked = nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])
compiled[0].compile()
hooked[1].inner.register_forward_hook(lambda *given: None)
dropping = nn.ModuleList([nn.Sequential(nn.LSTM(4, 4, 2, dropout=0.5)) for _ in range(2)])
print(json.dumps({
    "list": names(nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()]), "head": nn.Linear(4, 4)})),
    "stages": names(nn.Sequential(stage(2), stage(3), nn.Linear(4, 4))),
    "outermost": names(nn.ModuleList([Deep(), Deep()])),
    "rows": names(nn.ModuleList([small(), small()])),
    "wrapped": names(nn.ModuleDict({"module": nn.ModuleDict({"layers": stage(2)})})),
    "in_compiled": names(torch.compile(nn.ModuleDict({"layers": stage(3)}))),
    "none": names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))),
    "single": names(nn.ModuleList([Block()])),
    "encoders": names(nn.ModuleDict({"query": Encoder(), "key": Encoder()})),
    "scattered": names(nn.ModuleDict({"in": nn.ModuleList([Stage()]), "middle": Block(), "out": Stage()})),
    "listed": names(Listed()),
    "shelves": names(nn.ModuleList([nn.ModuleDict({"layer": Shelves()}) for _ in range(2)])),
    "levels": names(nn.ModuleList([Levels(), Levels()])),
    "sequence": names(nn.Sequential(*[one for _ in range(9) for one in (nn.Linear(4, 4), nn.ReLU())])),
    "sequences": names(nn.ModuleDict({
        "features": nn.Sequential(nn.ReLU(), *[nn.Linear(4, 4) for _ in range(4)]), "head": small(),
    })),
    "alike": names(nn.ModuleList([nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]) for _ in range(2)])),
    "fine": why_not(find_blocks(stage(2))[0]),
    "compiled": why_not(find_blocks(compiled)[0]),
    "hooked": why_not(find_blocks(hooked)[1]),
    "dropping": why_not(find_blocks(dropping)[0]),
}))
"""


def test_blocks_are_what_repeats_outermost(run_checks: Callable[..., dict[str, Any]]) -> None:
    found = run_checks(BLOCKS)
    assert found["list"] == ["layers.0", "layers.1"]
    assert found["stages"] == ["0.0", "0.1", "1.0", "1.1", "1.2"]
    assert found["outermost"] == ["0", "1"]
    assert found["rows"] == ["0", "1"]
    assert found["wrapped"] == ["module.layers.0", "module.layers.1"]
    assert found["encoders"] == ["query.layers.0", "query.layers.1", "key.layers.0", "key.layers.1"]
    assert found["scattered"] == ["in.0", "middle", "out"]
    assert found["listed"] == ["known.0", "loose.0", "loose.1", "named.last"]
    assert found["shelves"] == ["0.layer", "1.layer"]
    assert found["levels"] == [f"{i}.of.{j}.{name}" for i in "01" for j in "01" for name in ("one", "two")]
    assert found["sequence"] == ["0-5", "6-11", "12-17"]
    assert found["sequences"] == ["features.0-2", "features.3-4", "head"]
    assert found["alike"] == ["0", "1"]
    assert found["none"] == found["single"] == found["in_compiled"] == []
    assert found["fine"] == ""
    assert "torch.compile" in found["compiled"]
    assert "1.inner has forward hooks" in found["hooked"]
    assert "drops values by numbers of cuDNN's own" in found["dropping"]


def test_a_forward_pass_is_cut_only_where_that_changes_nothing() -> None:
    found = told_by_file(PROGRAM.with_name("forward_parts.py"))
    rows = ["one-two", "three-four"]
    cut = {"Straight": rows, "Held": [f"inner.{row}" for row in rows], "Failing": rows}
    assert {name: told for name, told in found["names"].items() if told} == cut
    assert found["unasked"] == [], "a forward pass is left whole unless the user asks"
    assert found["exchanged"]
    same, refusal, signature, is_left = found["called"]
    assert (same, is_left) == (True, False)
    assert "too many positional arguments" in refusal
    assert signature == "(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor"
    assert found["line"] == 4, "errors are at the lines of the program's own text"
