"""Drives the real caching allocator of torch on the virtual GPU and writes down what it did after every step.

Arguments: the file of programs (.npz), the file for the answers (.npz), the device's bytes. Settings come through
PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, as this torch reads it. Programs lie one after the other: `step` (0
alloc, 1 free, 2 empty the cache), `request` (row of the step, -1 for none), `program` (of each step), and for each
request `size`, `stream`, `shared` (1: another stream uses the memory too, so that its free has to wait for that
stream). With a folder as fourth argument, each program is recorded from its middle on, and its snapshot is left there.
"""

import contextlib
import pickle
import sys
from pathlib import Path

import numpy as np

from stalloc.device import VirtualGPU, virtual

programs_path, answers_path, total_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
folder = Path(sys.argv[4]) if len(sys.argv) > 4 else None
virtual.activate(VirtualGPU(name="Oracle", total_bytes=total_bytes, compute_capability=(9, 0), num_devices=1))

import torch  # noqa: E402

SNAPSHOT_EVERY = 250

torch.cuda.init()
take, give = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
stats = torch._C._cuda_memoryStats
data = dict(np.load(programs_path))
streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3))]
number_of_stream = {stream.cuda_stream: i for i, stream in enumerate(streams)}
steps = list(zip(data["step"].tolist(), data["request"].tolist(), data["program"].tolist(), strict=True))
size, on_stream, shared = data["size"].tolist(), data["stream"].tolist(), data["shared"].tolist()
reserved, block_bytes, address = (np.full(len(steps), -1, np.int64) for _ in range(3))
live: dict[int, object] = {}
segments: list[tuple[int, int]] = []  # program, address
blocks: list[tuple[int, ...]] = []  # step, segment address, address, bytes, requested bytes, state, stream, small
STATES = {"inactive": 0, "active_allocated": 1, "active_pending_free": 2}


def allocate(row: int) -> int:
    stream = streams[on_stream[row]]
    if not shared[row]:
        live[row] = where = take(size[row], stream.cuda_stream)
        return where
    with torch.cuda.stream(stream):
        tensor = torch.empty(size[row], dtype=torch.uint8, device="cuda")
    tensor.record_stream(streams[(on_stream[row] + 1) % len(streams)])
    live[row] = tensor
    return tensor.data_ptr()


def free(row: int) -> None:
    held = live.pop(row, None)
    if isinstance(held, int):
        give(held)
    del held


def note_blocks(at: int) -> None:
    for segment in torch.cuda.memory._snapshot()["segments"]:
        for block in segment["blocks"]:
            state = STATES[block["state"]]
            where = number_of_stream[segment["stream"]], int(segment["segment_type"] == "small")
            requested = block["requested_size"] if state else 0
            blocks.append((at, segment["address"], block["address"], block["size"], requested, state, *where))


def end_program(program: int) -> None:
    """Keep what was recorded, and begin anew with nothing."""
    snapshot = torch.cuda.memory._snapshot()
    events = snapshot["device_traces"][0]
    segments.extend((program, event["addr"]) for event in events if event["action"] == "segment_alloc")
    if folder:
        (folder / f"program{program}.pickle").write_bytes(pickle.dumps(snapshot))
    for held in list(live):
        free(held)
    torch.cuda.empty_cache()
    record(False)
    record(folder is None)


def record(on: bool) -> None:
    torch.cuda.memory._record_memory_history("all" if on else None, context=None, max_entries=1_000_000)


record(folder is None)
num_steps = np.bincount(data["program"])
middles = set((np.cumsum(num_steps) - num_steps // 2).tolist())
current = 0
for at, (step, row, program) in enumerate(steps):
    if program != current:
        end_program(current)
        current = program
    if folder and at in middles:
        record(True)
    if step == 0:
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            address[at] = allocate(row)
    elif step == 1:
        free(row)
    else:
        torch.cuda.empty_cache()
    now = stats(0)
    reserved[at] = now["reserved_bytes"]["all"]["current"]
    block_bytes[at] = now["allocated_bytes"]["all"]["current"]
    if at % SNAPSHOT_EVERY == 0:
        note_blocks(at)
end_program(current)
np.savez(
    answers_path,
    reserved=reserved,
    block_bytes=block_bytes,
    address=address,
    segments=np.array(segments, np.int64).reshape(-1, 2),
    blocks=np.array(blocks, np.int64).reshape(-1, 8),
)
