"""What torch answers about memory, errors included: python torch_answers.py native|stalloc."""

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalloc.device import VirtualGPU, activate

GPU = VirtualGPU(name="Test GPU", total_bytes=4 << 30, num_devices=2)
if sys.argv[1] == "stalloc":
    import stalloc

    stalloc.install(device="virtual", gpu=GPU)
else:
    activate("virtual", GPU)
import torch  # noqa: E402  (the device is in place)

warnings.simplefilter("ignore")
MIB = 1 << 20
answers: dict[str, Any] = {}


def ask(function: Callable[[], Any]) -> None:
    """Keep what a function returns, or the kind of its error."""
    try:
        answers[function.__name__] = function()
    except Exception as error:
        answers[function.__name__] = f"{type(error).__name__}: {error}"


def kind_of_error(function: Callable[..., Any], *arguments: Any) -> str:
    """The name of the error that a call raises, "none" if it does not."""
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__
    return "none"


def new(size: int, device: str = "cuda") -> torch.Tensor:
    """A block of that many bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def shape(value: Any) -> Any:
    """The keys of nested dicts."""
    return {key: shape(inner) for key, inner in sorted(value.items())} if isinstance(value, dict) else None


@ask
def before_cuda_is_used() -> list[Any]:
    figures = [torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()]
    return [*figures, torch.accelerator.memory_allocated(), torch.cuda.is_initialized()]


@ask
def names_of_devices() -> list[int]:
    x = new(MIB)
    names = (None, 0, "cuda", "cuda:0", "cuda:1", torch.device("cuda", 1))
    return [torch.cuda.memory_allocated(name) for name in names] + [x.numel()]


@ask
def devices_that_are_not_there() -> list[str]:
    asked = (torch.cuda.memory_allocated, torch.cuda.reset_peak_memory_stats, torch.cuda.reset_accumulated_memory_stats)
    return [kind_of_error(function, device) for function in asked for device in (5, "cpu")]


@ask
def shares_of_the_device() -> list[Any]:
    found = [torch.cuda.get_per_process_memory_fraction()]
    torch.cuda.set_per_process_memory_fraction(0.25)
    found += [torch.cuda.get_per_process_memory_fraction(), kind_of_error(new, 2 << 30), new(900 * MIB).numel()]
    torch.cuda.set_per_process_memory_fraction(1.0)
    found += [new(2 << 30).numel(), kind_of_error(torch.cuda.set_per_process_memory_fraction, 2)]
    torch.cuda.set_per_process_memory_fraction(0.5, 1)
    return [*found, *map(torch.cuda.get_per_process_memory_fraction, (0, 1, "cuda:1"))]


@ask
def memory_by_address() -> list[Any]:
    before = torch.cuda.memory_allocated()
    address = torch.cuda.caching_allocator_alloc(3 * MIB)
    found = [torch.cuda.memory_allocated() - before]
    torch.cuda.caching_allocator_delete(address)
    torch.cuda.caching_allocator_delete(0)
    address = torch.cuda.caching_allocator_alloc(1000, device=1, stream=torch.cuda.Stream(1))
    found.append(torch.cuda.memory_allocated(1))
    torch.cuda.caching_allocator_delete(address)
    return [*found, torch.cuda.memory_allocated() - before, torch.cuda.memory_allocated(1)]


@ask
def another_allocator() -> str:
    made = torch.cuda.memory._CUDAAllocator(torch._C._cuda_customAllocator(1, 2))
    return kind_of_error(torch.cuda.memory.change_current_allocator, made)


@ask
def history() -> list[Any]:
    new(7 * MIB)
    torch.cuda.memory._record_memory_history(max_entries=100)
    new(MIB)
    snapshot = torch.cuda.memory._snapshot()
    events = snapshot["device_traces"][0]
    found: list[Any] = [sorted(snapshot.keys() - {"stalloc"}), len(snapshot["device_traces"])]
    found += [[event["action"] for event in events[-3:]]]
    found += [sorted(events[-1]), sorted(snapshot["segments"][0]), sorted(snapshot["segments"][0]["blocks"][0])]
    found.append(any(event["size"] == 7 * MIB for event in events))  # from before: no
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(max_entries=3)
    for i in range(10):
        new(MIB + 512 * i)
    elsewhere = new(MIB, "cuda:1")
    snapshot = torch.cuda.memory._snapshot()
    found += [len(snapshot["device_traces"][0]), [event["size"] for event in snapshot["device_traces"][1]][-1:]]
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(True, trace_alloc_max_entries=2, trace_alloc_record_context=False)
    new(elsewhere.numel())
    found.append(len(torch.cuda.memory._snapshot()["device_traces"][0]))
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.memory._dump_snapshot(f"{folder}/history.pickle")
        found.append(Path(folder, "history.pickle").stat().st_size > 0)
    torch.cuda.memory._record_memory_history(None)
    return found


@ask
def notes() -> list[str]:
    torch.cuda.memory._set_memory_metadata("layer 3")
    return [torch.cuda.memory._get_memory_metadata()]


@ask
def forms() -> list[Any]:
    nested, flat = torch.cuda.memory_stats_as_nested_dict(), torch.cuda.memory_stats()
    summaries = torch.cuda.memory_summary(), torch.cuda.memory_summary("cuda:1", abbreviated=True)
    lines = [len(summary.splitlines()) for summary in summaries]
    return [shape(nested), sorted(flat), sorted(torch.accelerator.memory_stats()), lines]


@ask
def resets() -> list[int]:
    x = new(100 * MIB)
    del x
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    stats = torch.cuda.memory_stats()
    zeros = [value for key, value in stats.items() if key.startswith("num_") or key.endswith((".allocated", ".freed"))]
    new(3 * MIB)
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    same = torch.accelerator.max_memory_allocated() == torch.accelerator.memory_allocated()
    return [sum(zeros), torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated(), same]


@ask
def observers() -> list[Any]:
    seen: list[tuple[int, ...]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *facts: seen.append(facts))
    return [kind_of_error(new, 9 << 30), len(seen), len(seen[0]), seen[0][:2]]


@ask
def graphs() -> list[Any]:
    graph, second, x = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.ones(1000, device="cuda")
    with torch.cuda.graph(graph):
        y = x * 2
    with torch.cuda.graph(second, pool=graph.pool()):
        z = y + 1
    graph.replay()
    second.replay()
    model = torch.nn.Linear(64, 64).cuda()
    called = torch.cuda.make_graphed_callables(model, (torch.ones(8, 64, device="cuda", requires_grad=True),))
    out = called(torch.ones(8, 64, device="cuda", requires_grad=True))
    out.sum().backward()
    return [z.numel(), list(out.shape), tuple(graph.pool()) != (0, 0)]


print(json.dumps(answers))
