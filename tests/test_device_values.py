"""Small integers and booleans on the virtual GPU: they have their values, and no request is made for it."""

from typing import Any

import pytest

from stalloc.device.deciding_lines import MOST_IN_A_ROW

pytestmark = pytest.mark.usefixtures("cuda_torch")

_PROLOGUE = """
import json, sys
from stalloc.device import VirtualGPU, virtual
virtual.activate(VirtualGPU(name="Test GPU", total_bytes=8 << 30, compute_capability=(8, 0)))
import torch
def decisions():
    return [[one["place"].rpartition(":")[2], one["num_reads"]] for one in virtual.findings()["decisions"]]
"""

_VALUES = (
    _PROLOGUE
    + """
mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).cuda()
numbers = torch.arange(10, device="cuda")
weights = torch.randn(10, 4, device="cuda", requires_grad=True)
chosen = weights[numbers > 6]
chosen.sum().backward()
even = numbers[numbers % 2 == 0].tolist()
numbers[2:4] = 7
numbers += 1
filled = torch.zeros(4, dtype=torch.long, device="cuda")
filled[1:].fill_(3)
with torch.inference_mode():
    inference = [torch.cat([mask[0], mask[1]]).sum().item(), (mask * 2).max().item()]
with torch.device("cuda"):
    by_default = [torch.arange(3).tolist(), str(torch.ones(2, dtype=torch.int32).device)]
once = torch.unique(mask, return_counts=True)
lengths = mask.sum(-1)
print(json.dumps({
    "reductions": [bool(torch.all(mask == 1)), bool((mask[1] == 1).all()), mask.sum().item(), int(mask.max())],
    "running": [mask.cumsum(-1).tolist(), (mask.long().cumsum(-1) - 1).clamp(min=0).cpu().tolist()],
    "masks": [even, list(chosen.shape), list(weights.grad.shape)],
    "in place": [numbers.tolist(), filled.tolist()],
    "lengths": [lengths.tolist(), torch.repeat_interleave(lengths).tolist(), list(torch.nonzero(mask).shape)],
    "unique": [part.tolist() for part in once],
    "one hot": list(torch.nn.functional.one_hot(lengths).shape),
    "bins": [torch.bincount(lengths).tolist(), list(torch.bincount(lengths, minlength=9).shape)],
    "aligned": list(torch.nn.functional.ctc_loss(  # which reads the lengths, and refuses targets of another length
        torch.randn(9, 2, 5, device="cuda").log_softmax(-1), mask[mask == 1], torch.tensor([9, 9]).cuda(), lengths
    ).shape),
    "where": [part.tolist() for part in torch.where(mask == 0)],
    "inference": inference,
    "by default": by_default,
    "conversions": [mask.bool().tolist()[0], mask.to(torch.int32).to("cpu").tolist()[1], mask.clone()[0, 2].item()],
    "decisions": decisions(),
}))
"""
)


@pytest.fixture(scope="module")
def values(run_checks: Any) -> Any:
    return run_checks(_VALUES)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("reductions", [False, True, 5, 1]),
        ("running", [[[1, 2, 2], [1, 2, 3]], [[0, 1, 1], [0, 1, 2]]]),
        ("masks", [[0, 2, 4, 6, 8], [3, 4], [10, 4]]),
        ("in place", [[1, 2, 8, 8, 5, 6, 7, 8, 9, 10], [0, 3, 3, 3]]),
        ("lengths", [[2, 3], [0, 0, 1, 1, 1], [5, 2]]),
        ("unique", [[0, 1], [1, 5]]),
        ("one hot", [2, 4]),
        ("bins", [[0, 0, 1, 1], [9]]),
        ("aligned", []),
        ("where", [[0], [2]]),
        ("inference", [5, 2]),
        ("by default", [[0, 1, 2], "cuda:0"]),
        ("conversions", [[True, True, False], [1, 1, 1], 0]),
    ],
)
def test_small_integers_are_computed(values: Any, what: str, expected: Any) -> None:
    assert values[what] == expected


def test_what_is_known_is_no_doubtful_decision(values: Any, more_values: Any) -> None:
    assert values["decisions"] == more_values["decisions"] == []


_MORE = (
    _PROLOGUE
    + """
import copy, io
import torch.nn.functional as F
lengths = torch.tensor([3, 9, 4]).cuda()
edges = torch.tensor([[0, 1, 1, 2, 2, 2], [1, 0, 0, 2, 2, 1]]).cuda()
starts = F.pad(lengths.cumsum(0), (1, 0))
kept = torch.empty(3, dtype=torch.long, device="cuda")
kept.copy_(torch.tensor([4, 5, 6]))
cleared = torch.empty(2, dtype=torch.long, device="cuda").zero_()
packed = torch.nn.utils.rnn.pack_padded_sequence(torch.empty(9, 3, 2).cuda(), lengths.cpu(), enforce_sorted=False)
weight, scaler = torch.ones(4, device="cuda", requires_grad=True), torch.cuda.amp.GradScaler(growth_interval=2)
scales = []
for _ in range(4):
    scaler.scale(weight.sum()).backward()
    scaler.step(torch.optim.SGD([weight], lr=0.1))
    scaler.update()
    scales.append(scaler.get_scale())
optimizer, file = torch.optim.AdamW([weight]), io.BytesIO()
optimizer.step()
torch.save(optimizer.state_dict(), file)
file.seek(0)
optimizer.load_state_dict(torch.load(file, map_location="cuda"))
optimizer.step()
print(json.dumps({
    "numbers of Python": [float(lengths.sum()), complex(lengths.max()).real],
    "starts of packed sequences": [starts.tolist(), int((starts[1:] - starts[:-1]).max())],
    "segments of given lengths": list(torch.segment_reduce(weight.new_empty(16, 2), "max", lengths=lengths).shape),
    "different columns": torch.unique(edges, dim=1).tolist(),
    "runs of columns": list(torch.unique_consecutive(edges, dim=1).shape),
    "entries of a sparse matrix": torch.sparse_coo_tensor(edges, torch.ones(6).cuda(), (3, 3)).coalesce()._nnz(),
    "copies": copy.deepcopy(lengths).tolist(),
    "arguments by name": [torch.cat(tensors=[lengths, lengths]).tolist(), torch.sum(input=lengths).item()],
    "all that was overwritten": [kept.tolist(), cleared.tolist(), kept.copy_(lengths).tolist()],
    "scales of gradients": scales,
    "steps that a file put on the GPU": optimizer.state[weight]["step"].item(),
    "an order turned round": packed.unsorted_indices.tolist(),
    "equal": [torch.equal(lengths, lengths + 0), lengths.equal(lengths + 1)],
    "few floating-point numbers": [
        (torch.tensor([[1.0, 2.0]]).cuda() * torch.tensor(1.5).cuda()).tolist(),
        (torch.ceil(lengths.float() / 2)).long().tolist(),
        ((lengths > 3).sum().float() / 4).item(),
        bool((torch.tensor([1.0, 5.0], device="cuda").diff() <= 0).any()),
    ],
    "decisions": decisions(),
}))
"""
)


@pytest.fixture(scope="module")
def more_values(run_checks: Any) -> Any:
    return run_checks(_MORE)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("numbers of Python", [16.0, 9.0]),
        ("starts of packed sequences", [[0, 3, 12, 16], 9]),
        ("segments of given lengths", [3, 2]),
        ("different columns", [[0, 1, 2, 2], [1, 0, 1, 2]]),
        ("runs of columns", [2, 4]),
        ("entries of a sparse matrix", 4),
        ("copies", [3, 9, 4]),
        ("an order turned round", [2, 0, 1]),
        ("scales of gradients", [65536.0, 131072.0, 131072.0, 262144.0]),
        ("steps that a file put on the GPU", 2.0),
        ("arguments by name", [[3, 9, 4, 3, 9, 4], 16]),
        ("all that was overwritten", [[4, 5, 6], [0, 0], [3, 9, 4]]),
        ("equal", [True, False]),
        ("few floating-point numbers", [[[1.5, 3.0]], [2, 5, 2], 0.5, False]),
        ("decisions", []),
    ],
)
def test_sizes_that_follow_from_known_numbers_are_right(more_values: Any, what: str, expected: Any) -> None:
    assert more_values[what] == expected


_DOUBTFUL = (
    _PROLOGUE
    + """
model = torch.nn.Linear(4, 4, device="cuda")
scores = model(torch.randn(1000, 4, device="cuda"))
loss = scores.mean()
finite = bool(torch.isfinite(loss).all())
below = bool(loss < 1)
close = torch.allclose(scores, scores * 2)
labels = torch.zeros(3, 600, 600, dtype=torch.long, device="cuda").random_(0, 20)
picked = list(torch.randn(3, 600, 600, 4, device="cuda")[labels != 255].shape)
beams, ended = scores[:2].detach(), torch.zeros(2, 4, dtype=torch.bool, device="cuda")
goes_on = bool((beams > torch.where(ended, beams, -1e9)).any())  # as beam search asks
merged = torch.cat([torch.full((2, 2), -1e9, device="cuda"), beams[:, :2] + ended[:, :2].float() * -1e9], 1)
best = sorted(merged.topk(2)[1][0].tolist())
finite_too = bool(torch.isfinite(ended.sum() / beams[0, :1]))
kept = scores[scores[:, 0] > 0.5]
kept.sum().backward()
torch.distributions.Categorical(logits=scores, validate_args=True)
loss.item()
str(scores)
answers = [finite, below, close, goes_on, best, finite_too, picked, len(kept)]
print(json.dumps({"answers": answers, "decisions": decisions()}))
"""
)


def test_what_floating_point_numbers_decide_is_as_for_zeros_and_counted(run_checks: Any) -> None:
    found = run_checks(_DOUBTFUL)
    assert found["answers"] == [True, True, True, True, [2, 3], True, [0, 4], 0]
    lines = [1 + _DOUBTFUL.splitlines().index(line) for line in _DOUBTFUL.splitlines() if _decides(line)]
    assert sorted(int(line) for line, _ in found["decisions"]) == lines


_REPEATED = (
    _PROLOGUE
    + """
data, times = torch.randn(3, 4, device="cuda", requires_grad=True), torch.tensor([2, 0, 3]).cuda()
numbers = torch.arange(6, device="cuda").reshape(2, 3)
longer = torch.repeat_interleave(data, times, 0)
longer.sum().backward()
print(json.dumps([
    list(longer.shape), list(data.repeat_interleave(repeats=times, dim=0).shape),
    list(data.repeat_interleave(torch.tensor([2]).cuda(), dim=1).shape),
    list(torch.repeat_interleave(data[:, :3], times, 0, output_size=5).shape),
    list(data.repeat_interleave(torch.tensor(2).cuda()).shape), list(data.repeat_interleave(3, dim=0).shape),
    torch.repeat_interleave(times).tolist(), numbers.repeat_interleave(times, 1).tolist(),
    numbers.repeat_interleave(2, 0).tolist(),
]))
"""
)


def test_what_is_repeated_as_often_as_a_tensor_says_has_its_length(run_checks: Any) -> None:
    assert run_checks(_REPEATED) == [
        *([5, 4], [5, 4], [3, 8], [5, 3], [24], [9, 4]),
        *([0, 0, 2, 2, 2], [[0, 0, 2, 2, 2], [3, 3, 5, 5, 5]], [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2),
    ]


_DISTRIBUTIONS = (
    _PROLOGUE
    + """
from torch.distributions import Beta, Categorical, Independent, MultivariateNormal, Normal, Uniform, kl_divergence
head = torch.nn.Linear(64, 32).cuda()
mean, spread = head(torch.ones(100, 64, device="cuda")), torch.nn.Parameter(torch.zeros(32, device="cuda"))
normal = Normal(mean, spread.exp())
(normal.rsample().sum() + kl_divergence(normal, Normal(0.0, 1.0)).sum()).backward()
Independent(Normal(mean, torch.nn.functional.softplus(mean) + 1e-3), 1).log_prob(mean)
Beta(mean.exp(), mean.exp()).sample()
Uniform(mean, mean + 1).sample()
MultivariateNormal(mean, scale_tril=torch.diag_embed(mean.exp())).rsample()
Categorical(logits=torch.randn(12000, 16, device="cuda")).log_prob(torch.zeros(12000, device="cuda"))
refused = 0
for wrong in (torch.tensor([2, -1]).cuda(), torch.full((3,), -1.0).cuda()):
    try:
        Normal(torch.zeros(len(wrong)).cuda(), wrong)
    except ValueError:
        refused += 1
print(json.dumps(refused))
"""
)


def test_distributions_take_what_a_model_computes_and_refuse_what_is_known_to_be_wrong(run_checks: Any) -> None:
    assert run_checks(_DISTRIBUTIONS) == 2


_STALE = (
    _PROLOGUE
    + """
uploaded = [torch.tensor(0.5, dtype=dtype).cuda() for dtype in (torch.float32, torch.float64) for _ in range(16)]
del uploaded  # kernels write their counts where these were
scores = torch.randn(600, 600, device="cuda")
print(json.dumps([scores[scores > 1].numel(), len(scores.nonzero()), torch.randn(4, device="cuda").sum().item()]))
"""
)


def test_a_count_that_no_kernel_wrote_is_not_what_was_uploaded_there_before(run_checks: Any) -> None:
    assert run_checks(_STALE) == [0, 0, 0.0]


def _decides(line: str) -> bool:
    return line.startswith(("finite", "below", "close", "goes_on", "best", "picked", "kept =", "torch.distributions"))


_GENERATION = (
    _PROLOGUE
    + """
torch.manual_seed(0)
head = torch.nn.Linear(16, 100, device="cuda")
table = torch.nn.Embedding(100, 16, device="cuda")
tokens = torch.randint(5, 100, (2, 4)).cuda()
unfinished = torch.ones(2, dtype=torch.long, device="cuda")
end, longest = torch.tensor([2], device="cuda"), 9
while True:
    following = head(table(tokens))[:, -1].argmax(-1)
    following = following * unfinished + (1 - unfinished)
    tokens = torch.cat([tokens, following[:, None]], dim=-1)
    is_long = torch.full((2,), tokens.shape[1] >= longest, dtype=torch.bool, device="cuda")
    done = is_long | torch.isin(tokens[:, -1], end)
    unfinished = unfinished & ~done
    if unfinished.max() == 0:
        break
print(json.dumps([list(tokens.shape), decisions()]))
"""
)


def test_generation_ends_and_names_the_line_that_reads_what_is_not_known(run_checks: Any) -> None:
    shape, decisions = run_checks(_GENERATION)
    assert shape == [2, 9]
    line = 1 + _GENERATION.splitlines().index("    if unfinished.max() == 0:")
    assert decisions == [[str(line), 5]]


_WAITING = (
    _PROLOGUE
    + """
from stalloc.device import deciding_lines as limits
limits.MOST_IN_A_ROW = int(sys.argv[1])
scores, num_turns = torch.randn(4, device="cuda"), 0
try:
    while not (scores.softmax(0) > 2).any():
        num_turns += 1
    print(json.dumps([num_turns, ""]))
except RuntimeError as error:
    print(json.dumps([num_turns, str(error)]))
"""
)


@pytest.mark.parametrize("most", [1_000, pytest.param(MOST_IN_A_ROW, marks=pytest.mark.slow)])
def test_a_loop_that_waits_for_what_no_kernel_computes_is_ended_with_its_line(run_checks: Any, most: int) -> None:
    num_turns, sentence = run_checks(_WAITING, str(most))
    line = 1 + _WAITING.splitlines().index("    while not (scores.softmax(0) > 2).any():")
    assert num_turns == most
    assert f":{line} reads again and again" in sentence
    assert "stalloc dryrun --assume" in sentence


_LAZY = (
    _PROLOGUE
    + """
model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.LazyBatchNorm1d()).to("cuda").float()
loss = model(torch.randn(4, 6, device="cuda")).sum()
loss.backward()
print(json.dumps([list(model[0].weight.grad.shape), model[1].running_mean.device.type]))
"""
)


def test_modules_without_shapes_yet_are_moved_as_ever(run_checks: Any) -> None:
    assert run_checks(_LAZY) == [[8, 6], "cuda"]


_CTC = (
    _PROLOGUE
    + """
from torch.utils._python_dispatch import TorchDispatchMode
class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))
scores = torch.randn(20, 2, 5, device="cuda", requires_grad=True)
targets, lengths, of_targets = torch.ones(2, 4, dtype=torch.long), torch.tensor([20, 18]), torch.tensor([4, 3])
for where in ("cpu", "cuda"):
    with Watching():
        loss = torch.nn.CTCLoss()(scores.log_softmax(2), targets.cuda(), lengths.to(where), of_targets.to(where))
        loss.backward()
print(json.dumps(list(scores.grad.shape)))
"""
)


def test_ctc_reads_its_lengths_under_a_dispatch_mode_too(run_checks: Any) -> None:
    assert run_checks(_CTC) == [20, 2, 5]
