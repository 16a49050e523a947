"""What torch says of memory under stalloc: statistics, snapshots, the history, as its own allocator says them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs.torch_checks import MODEL, PROLOGUE

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")


PROGRAMS = Path(__file__).parent / "programs"
MIB = 1 << 20


def asked(program: str, mode: str) -> Any:
    """What a program says in its last line, with torch's own allocator or stalloc's."""
    command = [sys.executable, str(PROGRAMS / program), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_statistics_are_what_the_native_allocator_says() -> None:
    native, ours = (asked("torch_statistics.py", mode) for mode in ("native", "stalloc"))
    assert len(native["points"]) == 25
    assert ours["points"] == native["points"]
    assert ours["summary"]
    assert ours["left"] <= 1.25 * native["left"]


@pytest.mark.slow
def test_functions_of_torch_answer_as_with_its_own_allocator() -> None:
    native, ours = (asked("torch_answers.py", mode) for mode in ("native", "stalloc"))
    assert len(native) == 12
    for name, answer in native.items():
        assert ours[name] == answer, name


def test_what_is_reserved_is_counted_from_the_first_segment_to_the_last(run_checks: Any) -> None:
    points = run_checks(
        PROLOGUE
        + """
points = []
def look():
    stats = torch.cuda.memory_stats()
    points.append([[stats[f"{what}.{pool}.{figure}"] for figure in ("current", "peak", "allocated", "freed")]
                   for what in ("reserved_bytes", "segment") for pool in ("all", "small_pool", "large_pool")]
                  + [[stats["inactive_split_bytes.all.current"], stats["inactive_split.all.current"]],
                     [torch.cuda.memory_reserved(), torch.cuda.memory_allocated()]])
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    model(torch.ones(300 * (step + 1 if step > 9 else 1), 1024, device="cuda")).sum().backward()
    look()
    optimizer.step()
    optimizer.zero_grad()
look()
RUNTIME.rest()
del model, optimizer
gc.collect()
torch._C._cuda_clearCublasWorkspaces()
torch.cuda.empty_cache()
look()
torch.cuda.reset_peak_memory_stats()
look()
show(points)
"""
    )[0]
    for point in points:
        for current, peak, allocated, freed in point[:6]:
            assert current == allocated - freed
            assert peak >= current >= 0
        for every, small, large in (point[:3], point[3:6]):
            assert [every[i] for i in (0, 2, 3)] == [small[i] + large[i] for i in (0, 2, 3)]
        assert 0 <= point[6][0] <= point[7][0] - point[7][1]
        assert (point[6][0] > 0) == (point[6][1] > 0)
        assert point[0][0] == point[7][0]
    assert points[0][1][0] > 0, "what is small has segments of its own while steps are watched"
    first_peak = max(point[0][1] for point in points)
    assert points[-2][0][:2] == [0, first_peak]
    assert points[-1][0][:2] == [0, 0]
    assert points[-1][0][2] == points[-1][0][3] >= first_peak


def test_a_snapshot_adds_up_to_the_statistics_on_the_heap_and_on_the_plan(run_checks: Any) -> None:
    points = run_checks(
        PROLOGUE
        + MODEL
        + """
side = torch.cuda.Stream()
def look(held):
    torch.cuda.memory_stats()
    segments = torch.cuda.memory_snapshot()
    stats = torch.cuda.memory_stats()
    blocks = [block for segment in segments for block in segment["blocks"]]
    live = {b["address"]: b["requested_size"] for b in blocks if b["state"] == "active_allocated"}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address, "blocks cover their segment"
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
        assert segment["device"] == 0
    return [
        sum(s["total_size"] for s in segments) == torch.cuda.memory_reserved(),
        sum(s["requested_size"] for s in segments) == stats["requested_bytes.all.current"],
        len(live) == stats["allocation.all.current"],
        all(live[t.data_ptr()] == t.untyped_storage().nbytes() for t in held),
        any(s["stream"] == side.cuda_stream for s in segments),
    ]
optimizer = torch.optim.AdamW([p for layer in [*layers, head] for p in layer.parameters()])
with torch.cuda.stream(side):
    other = new(3 * MIB)
points = [look([layers[0].weight, other])]
for step in range(8):
    target = torch.zeros(64, dtype=torch.int64, device="cuda")
    loss = F.cross_entropy(forward(torch.ones(64, 512, device="cuda")), target)
    points.append(look([loss, target, other]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
show(points, CONTROLLER.status.phase.value)
"""
    )
    looks, phase = points
    assert phase == "running on the plan"
    assert looks == [[True] * 5] * 9


def test_the_memory_history_is_recorded_under_stalloc(run_checks: Any) -> None:
    before, names, alive, nbytes, after = run_checks(
        PROLOGUE
        + """
held = [new(3 * MIB), new(5 * MIB)]
before = len(torch.cuda.memory._snapshot()["device_traces"][0])
torch.cuda.memory._record_memory_history(max_entries=1000)
a, b = new(7 * MIB), new(1000)
del a
gc.collect()
snapshot = torch.cuda.memory._snapshot()
import pickle
pickle.dumps(snapshot)
history = snapshot["device_traces"][0]
names = sorted({event["action"] for event in history})
alive = {event["addr"] for event in history if event["action"] == "alloc"}
for event in history:
    if event["action"] == "free_completed":
        alive.discard(event["addr"])
nbytes = [event["size"] for event in history if event["action"] == "alloc"][-2:]
torch.cuda.memory._record_memory_history(enabled=None)
after = len(torch.cuda.memory._snapshot()["device_traces"][0])
show(before, names, sorted(alive) == [b.data_ptr()], nbytes, after)
"""
    )
    assert before == after == 0
    assert {"alloc", "free_completed", "segment_map"} <= set(names)
    assert alive
    assert nbytes == [7 * MIB, 1000]


@pytest.mark.slow
def test_the_memory_history_is_recorded_after_a_plan_is_in_force(run_checks: Any) -> None:
    """What was recorded for the plan, marks of steps included, is forgotten by then."""
    phase, sizes = run_checks(
        PROLOGUE
        + """
def step():
    held = [new(3 * MIB), new(5 * MIB)]
    del held
    stalloc.step()
for _ in range(20):
    step()
phase = stalloc.statistics()[0].phase
torch.cuda.memory._record_memory_history()
step()
history = torch.cuda.memory._snapshot()["device_traces"][0]
show(phase, [event["size"] for event in history if event["action"] == "alloc"])
"""
    )
    assert (phase, sizes) == ("running on the plan", [3 * MIB, 5 * MIB])


def test_every_statistic_that_torch_has_is_there_and_resets_as_its_own(run_checks: Any, run_program: Any) -> None:
    ask = """
x = torch.empty(1000, device="cuda")
y = torch.empty(1 << 20, device="cuda")
del y
stats = torch.cuda.memory_stats()
keys = sorted(stats)
counted = [stats["allocation.all.allocated"], stats["allocation.all.freed"]]
torch.cuda.reset_accumulated_memory_stats()
z = torch.empty(1000, device="cuda")
stats = torch.cuda.memory_stats()
counted += [stats["allocation.all.allocated"], stats["allocation.all.freed"], stats["allocation.all.current"]]
fraction = torch.cuda.get_per_process_memory_fraction()
torch.cuda.set_per_process_memory_fraction(0.5)
fractions = [fraction, torch.cuda.get_per_process_memory_fraction()]
print(json.dumps([keys, counted, fractions]))
"""
    ours = run_checks(PROLOGUE + ask)
    native = run_checks("import json; from stalloc.device import activate; activate('virtual'); import torch\n" + ask)
    assert ours == native
