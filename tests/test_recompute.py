"""Recomputation of blocks: what comes out is what the program itself computes, to the last bit, or one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_programs import told_by_file

pytestmark = pytest.mark.usefixtures("cuda_torch")

PROGRAM = Path(__file__).parent / "programs" / "recomputation.py"
EQUAL = (
    "gpt", "dropout", "batch_norm", "relu_in_place", "dropouts", "alpha_dropout", "attribute", "python_random",
    "buffer", "in_place", "made_inside", "own_generator", "changes_a_weight", "checkpoint_inside",
    "hands_on", "object", "closure", "sequence", "unlike", "statements", "other_weights", "mapped",
    "tally", "tally_outside", "gauge", "gauge_outside", "own_random", "random_outside", "spectral_norm",
    "spectral_norm_twice", "batch_norm_twice", "buffer_twice", "called_again",
)  # fmt: skip
REFUSED = {
    "grows_a_list": "its forward pass changes Layer.seen",
    "grows_a_global": "its forward pass changes LOG, a variable outside of it",
    "another_way": "does not do the same when it is computed again: its operation",
    "scripted": "it calls function, which is TorchScript",
}
SOMETIMES_REFUSED = ("weight_changes_later",)  #: by what is kept, and under autocast


def results(num_choices: int) -> dict[str, Any]:
    found: dict[str, Any] = told_by_file(PROGRAM, num_choices)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Every case with a few random choices of what is kept."""
    return results(0)


@pytest.mark.parametrize("case", EQUAL)
def test_losses_gradients_and_buffers_are_those_of_the_program(found: dict[str, Any], case: str) -> None:
    assert found[case] == {"equal": 4, "differs": 0, "raised": []}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_twice_is_refused_in_a_sentence(found: dict[str, Any], case: str) -> None:
    assert found[case]["equal"] == found[case]["differs"] == 0
    assert len(found[case]["raised"]) == 4
    assert all("layers." in told and REFUSED[case] in told for told in found[case]["raised"])
    assert all("Leave this block as it is." in told for told in found[case]["raised"])


@pytest.mark.parametrize("case", SOMETIMES_REFUSED)
def test_what_is_not_refused_is_equal(found: dict[str, Any], case: str) -> None:
    assert found[case]["differs"] == 0
    assert 0 < found[case]["equal"] == 4 - len(found[case]["raised"])


@pytest.mark.slow
def test_many_choices_of_what_is_kept_are_equal_too() -> None:
    many = results(10)
    assert {case: many[case]["equal"] for case in EQUAL} == dict.fromkeys(EQUAL, 20)


@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        ("copies", ["blocks.0", "blocks.1", "blocks.2"]),
        ("rows", ["0-8", "9-18", "19-20"]),
        ("parts", ["layer0-layer2", "layer3-rest"]),
    ],
)
def test_names_copies_and_saved_models_are_the_programs_own(
    found: dict[str, Any], case: str, blocks: list[str]
) -> None:
    told = found[case]
    assert told["same_names"]
    assert told["blocks"] == blocks
    assert told["moved"] == 0, "a copy that is recomputed must not use the weights of the original"
    assert told["own"] > 0
    assert told["same_loss"]
    assert (told["wrapped"], told["left"]) == (0, 0)


def test_backward_twice_computes_again_what_was_kept(found: dict[str, Any]) -> None:
    assert {name: told for name, told in found["twice"].items() if told == "True"}.keys() == {
        "nothing", "products", "drawn",
    }  # fmt: skip
    assert "is computed a third time" in found["twice"]["cannot_be_drawn"]


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
    assert found["exchanged"]
    same, refusal, signature, is_left = found["called"]
    assert (same, is_left) == (True, False)
    assert "too many positional arguments" in refusal
    assert signature == "(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor"
    assert found["line"] == 4, "errors are at the lines of the program's own text"


WRONG = """
import json
from stalloc import device
device.activate("virtual")
import stalloc, torch
from torch import nn
model = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
told = {}
for name, arguments in {
    "number": ((3,), {}), "flat": ((nn.Linear(2, 2),), {}), "many": ((model,), {"blocks": 4}),
    "name": ((model,), {"blocks": ["7"]}), "keep": ((model,), {"keep": "mm"}),
    "policy": ((model,), {"policy": "most"}), "number of policy": ((model,), {"policy": "blocks:x"}),
    "both": ((model,), {"policy": "blocks:2", "keep": ["mm"]}), "fit": ((model,), {"policy": "checkmate"}),
}.items():
    try:
        stalloc.checkpoint(*arguments[0], **arguments[1])
    except stalloc.BadInputError as error:
        told[name] = str(error)
told["again"] = [list(stalloc.checkpoint(model, blocks=2).names), dict(stalloc.checkpoint(model).left)]
print(json.dumps(told))
"""


def test_what_checkpoint_cannot_do_is_one_sentence(run_checks: Callable[..., dict[str, Any]]) -> None:
    told = run_checks(WRONG)
    assert told["number"] == "int is no torch module: give checkpoint() a model."
    assert "Linear has no repeated blocks" in told["flat"]
    assert told["many"] == "4 blocks are not possible: the model has 3."
    assert "no repeated block '7'" in told["name"]
    assert "give a list" in told["keep"]
    assert told["policy"].startswith("there is no policy 'most' for one model: give keep-attention, ")
    assert told["number of policy"] == "'blocks:x' has no number of blocks: give blocks:4, for example."
    assert told["both"].endswith("with keep or blocks beside it: give one or the other.")
    assert "use stalloc fit --policy checkmate" in told["fit"]
    assert told["again"] == [["0", "1"], {"0": "0 is recomputed already", "1": "1 is recomputed already"}]


BY_NAME = """
import json
from stalloc import device
device.activate("virtual")
import stalloc, torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))

class Names(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        called.append(str(func))
        return func(*args, **(kwargs or {}))

told = {}
for policy in (None, "keep-attention", "remat-aware", "blocks", "blocks:2"):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    names = stalloc.checkpoint(model, policy=policy).names if policy else ()
    called, loss = [], model(torch.randn(1, 4, 5, 8)).square().mean()
    with Names():
        loss.backward()
    again = sum("attention" in name and "backward" not in name for name in called)
    grads = [one.grad.tolist() for one in model.parameters()]
    told[policy] = [len(names), again, grads == told.setdefault("plain", grads)]
told.pop("plain")
print(json.dumps(told))
"""


def test_policies_by_name_recompute_what_they_say(run_checks: Callable[..., dict[str, Any]]) -> None:
    """Blocks that are recomputed, how often attention is, and whether gradients are those of the model."""
    assert run_checks(BY_NAME) == {
        "null": [0, 0, True],
        "keep-attention": [3, 0, True],
        "remat-aware": [3, 0, True],
        "blocks": [3, 3, True],
        "blocks:2": [2, 2, True],
    }


RECURRENT = """
import json
from stalloc import device
device.activate("virtual")
import stalloc, torch
from torch import nn
class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.norm = kind(64, 64), nn.LayerNorm(64)
    def forward(self, x):
        return self.norm(self.inner(x)[0] + x)
def train(kind, recompute):
    model = nn.Sequential(*(Layer(kind) for _ in range(6))).cuda()
    if recompute:
        stalloc.checkpoint(model, keep=["native_layer_norm"])
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        model(torch.randn(50, 32, 64, device="cuda")).sum().backward()
        model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated()
print(json.dumps([train(kind, True) < 0.7 * train(kind, False) for kind in (nn.LSTM, nn.GRU, nn.RNN)]))
"""


def test_recurrent_layers_of_cudnn_are_computed_again(run_checks: Callable[..., Any]) -> None:
    assert run_checks(RECURRENT) == [True, True, True]


SHARDED = """
import json, sys
from stalloc import device
device.activate("virtual")
import stalloc, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
sys.path.insert(0, sys.argv[1])
from transformer_block import Block
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
def train(recompute):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*model, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    done = stalloc.checkpoint(model, keep=["addmm"]) if recompute else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told = []
    for _ in range(3):
        loss = model(torch.randn(2, 16, 64)).square().mean()
        loss.backward()
        told += [loss.detach().clone(), *(one.grad.to_local().clone() for one in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return told, done
(plain, _), (again, done) = train(False), train(True)
equal = [torch.equal(one, other) for one, other in zip(plain, again, strict=True)]
print(json.dumps({"blocks": list(done.names), "left": done.left, "equal": equal}))
"""


def test_blocks_that_fsdp2_shards_are_computed_again_to_the_same_bits(
    run_checks: Callable[..., dict[str, Any]],
) -> None:
    found = run_checks(SHARDED, str(Path(__file__).parent / "programs" / "real"))
    assert found["blocks"] == ["0", "1", "2"]
    assert found["left"] == {}
    assert len(found["equal"]) > 3
    assert all(found["equal"])
