"""torch under stalloc where memory ends: errors in its own words, limits, shares of the device, the cache."""

from typing import Any

import pytest
from programs.torch_checks import PROLOGUE

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")


MIB = 1 << 20


def test_out_of_memory_in_forward_and_backward_is_torchs_error_with_our_words(run_checks: Any) -> None:
    texts, held, again, ooms, unknown = run_checks(
        PROLOGUE
        + """
texts = []
def attempt(function):
    try:
        function()
    except torch.OutOfMemoryError as error:
        texts.append(str(error))

class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1
    @staticmethod
    def backward(context, gradient):
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        return gradient

weight = torch.ones(1000, device="cuda", requires_grad=True)
for _ in range(3):
    attempt(lambda: new(3 << 30))
    attempt(lambda: Hungry.apply(weight * 2).sum().backward())
    attempt(lambda: new(2**63 - 1))
    attempt(lambda: new(1 << 54))
# what was allocated stays, what could not be is not counted; PyTorch's thread lets go of a failed pass before the next,
# but perhaps after the caller has its error
failed = weight.grad is None
(weight * 2).sum().backward()
learnt = weight.grad.shape[0]
weight.grad = None
held = [torch.cuda.memory_allocated(), failed]
again = [new(1 << 30).numel(), learnt]
show(texts, held, again, STATE.record.statistics.num_ooms, STATE.record.statistics.num_unknown_frees)
"""
    )
    assert len(texts) == ooms == 12
    assert all(text.startswith("CUDA out of memory. Tried to allocate ") for text in texts), "as programs look for it"
    assert all("stalloc: out of memory on device 0" in text for text in texts)
    assert f"({3 << 30} bytes)" in texts[0]
    assert f"({3 << 30} bytes)" in texts[1]
    assert f"({2**63 - 1} bytes)" in texts[2]
    assert held == [4096, True]
    assert again == [1 << 30, 1000]
    assert unknown == 0


def test_what_is_free_but_of_other_sizes_is_given_back_before_an_error(run_checks: Any) -> None:
    assert run_checks(
        PROLOGUE
        + """
for size in (300, 500, 700, 900, 1100, 1300, 1500, 1700):
    del_me = new(size * MIB)
    del del_me
whole = new(1900 * MIB)
show(STATE.record.statistics.num_ooms, torch.cuda.memory_reserved() <= 1908 * MIB)
"""
    ) == [0, True]


def test_limits_and_the_cache(run_checks: Any) -> None:
    limited, text, after, cache, tried = run_checks(
        PROLOGUE
        + """
torch.cuda.set_per_process_memory_fraction(0.25)
try:
    new(600 * MIB)
    limited, text = False, ""
except torch.OutOfMemoryError as error:
    limited, text = True, str(error)
torch.cuda.set_per_process_memory_fraction(1.0)
x = new(600 * MIB)
after = x.numel()
del x
before = torch.cuda.memory_reserved()
torch.cuda.empty_cache()
cache = [before, torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0], virtual.used_bytes()]
torch.backends.cudnn.benchmark = True  # torch asks how much it may try algorithms with
tried = list(torch.nn.Conv2d(3, 8, 3).cuda()(torch.ones(2, 3, 16, 16, device="cuda")).shape)
show(limited, text, after, cache, tried)
"""
    )
    assert limited
    assert "stalloc: out of memory" in text
    assert after == 600 * MIB
    assert cache == [600 * MIB, 0, 2 << 30, 0]
    assert tried == [2, 8, 14, 14]


def test_a_share_of_the_device_in_the_settings_is_kept_however_stalloc_was_installed(run_checks: Any) -> None:
    refused, served = run_checks(
        PROLOGUE
        + """
try:
    new(1100 * MIB)
except torch.OutOfMemoryError:
    show(True, new(1000 * MIB).numel())
""",
        PYTORCH_CUDA_ALLOC_CONF="per_process_memory_fraction:0.5",
    )
    assert (refused, served) == (True, 1000 * MIB)


def test_out_of_memory_on_the_plan_names_what_lives_in_the_arena(run_checks: Any) -> None:
    phase, text = run_checks(
        PROLOGUE
        + """
optimizer = torch.optim.SGD([torch.ones(10, device="cuda", requires_grad=True)])
text = ""
for step in range(12):
    a = new(400 * MIB)
    b = new(100 * MIB)
    if step == 11:
        try:
            new(1800 * MIB)
        except torch.OutOfMemoryError as error:
            text = str(error)
    del a, b
    optimizer.step()
show(CONTROLLER.status.phase.value, text)
"""
    )
    assert phase == "running on the plan"
    held = "Most is held: 400.00 MiB by one block, 100.00 MiB by one block"
    for part in ("Allocated 500.00 MiB", held, "the plan's arena", "whatever the allocator does", "stalloc dryrun"):
        assert part in text


def test_observers_of_out_of_memory_are_called_and_may_take_a_snapshot(run_checks: Any) -> None:
    seen, error = run_checks(
        PROLOGUE
        + """
seen = []
def observe(device, wanted, allocated, free):
    segments = torch.cuda.memory._snapshot()["segments"]
    seen.append([device, wanted, allocated, free, sum(s["total_size"] for s in segments)])
torch._C._cuda_attach_out_of_memory_observer(observe)
x = new(512 * MIB)
try:
    new(1700 * MIB)
    error = False
except torch.OutOfMemoryError:
    error = True
show(seen, error)
"""
    )
    assert seen == [[0, 1700 * MIB, 512 * MIB, 1536 * MIB, 512 * MIB]]
    assert error
