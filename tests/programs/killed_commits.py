"""A training with state and layers on disk is killed over and over, and goes on from what was committed: prints counts.

    killed_commits.py NUM_KILLS [FOLDER]

Each child is killed either in the middle of a call that writes, which it half makes, or by a signal at any moment.
After each the state in the folder has to be, bit by bit, that of the last commit that returned or of the one that was
being made, as a training gives that was never disturbed.
"""

import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stalloc import device

device.activate("virtual")

import torch  # noqa: E402  (the device is in place)

import stalloc  # noqa: E402

torch.set_num_threads(1)
STEPS, SHAPES = 24, ((40, 100), (64, 64), (10,), (90, 30))


class Layer(torch.nn.Module):
    def __init__(self, parameters: list[Any]) -> None:
        super().__init__()
        self.held = torch.nn.ParameterList(parameters)


def step(number: int, parameters: list[Any], optimizer: Any) -> None:
    generator = torch.Generator().manual_seed(number)
    for one in parameters:
        one.grad = torch.randn(one.shape, generator=generator)
    optimizer.param_groups[0]["lr"] = 1e-3 / number
    optimizer.step()


def undisturbed() -> list[tuple[list[torch.Tensor], Any]]:
    """Parameters and state after each step."""
    torch.manual_seed(2)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = torch.optim.AdamW(parameters)
    found: list[tuple[list[torch.Tensor], Any]] = []
    for number in range(STEPS + 1):
        if number:
            step(number, parameters, optimizer)
        state = {at: {name: it.clone() for name, it in values.items()}
                 for at, values in optimizer.state_dict()["state"].items()}  # fmt: skip
        found.append(([one.detach().clone() for one in parameters], state))
    return found


def last_commit(folder: Path) -> tuple[int, Any]:
    if not (folder / "state.json").exists():
        return 0, {}
    label, found = stalloc.committed(folder)
    return label, found


def go_on(folder: Path, reference: Any, committed: mmap.mmap) -> None:
    """Train from the last commit; `committed` gets the label of each commit that has returned."""
    label, found = last_commit(folder)
    parameters = [torch.nn.Parameter(one.clone()) for one in reference[label][0]]
    optimizer = torch.optim.AdamW(parameters)
    stalloc.page_optimizer(optimizer, host="48KiB", disk=f"{folder}:1MiB", window="40KB", device=0.2)
    layers = torch.nn.ModuleList([Layer(parameters[::2]), Layer(parameters[1::2])])
    streaming = stalloc.stream_layers(layers, window=1, host="32KiB", disk=f"{folder}/layers:1MiB")
    assert all(layer.is_on_disk for layer in streaming.layers)
    if found:
        optimizer.load_state_dict(found)
    for number in range(label + 1, STEPS + 1):
        step(number, parameters, optimizer)
        if number % 2 == 0:
            stalloc.commit(optimizer, number)
            committed[:8] = struct.pack("q", number)


def die_at(count: int) -> None:
    """Half make the call of this number among those that change files, and be killed."""
    left = count

    def dying(name: str) -> None:
        own = getattr(os, name)

        def call(*words: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if name == "pwritev":
                    descriptor, (view,), begin = words
                    own(descriptor, [memoryview(view)[: len(view) // 2 // 4096 * 4096]], begin)
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*words, **named)

        setattr(os, name, call)

    for name in ("pwritev", "fdatasync", "fsync", "replace", "unlink", "posix_fallocate"):
        dying(name)


def same(state: Any, wanted: Any) -> bool:
    return state.keys() == wanted.keys() and all(
        torch.equal(state[at][name], value) for at, values in wanted.items() for name, value in values.items()
    )


def main() -> None:
    num_kills, chance = int(sys.argv[1]), random.Random(7)
    reference = undisturbed()
    committed = mmap.mmap(-1, 8)
    told = {"kills": 0, "in a call": 0, "whole": 0, "finished": 0, "commits": 0, "half made": 0}
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as scratch:
        folder = Path(scratch) / "0"
        while told["kills"] < num_kills:
            before = last_commit(folder)[0]
            committed[:8] = struct.pack("q", before)
            in_call = chance.random() < 0.7
            count = chance.randrange(1, 240)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    if in_call:
                        die_at(count)
                    go_on(folder, reference, committed)
                    code = 0
                finally:
                    os._exit(code)
            if not in_call:
                time.sleep(chance.random() * 0.2)
                os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
            label, found = last_commit(folder)
            (returned,) = struct.unpack("q", committed[:8])
            is_whole = label in (returned, returned + 2) and (not label or same(found["state"], reference[label][1]))
            killed = os.WIFSIGNALED(status)
            told["kills"] += killed
            told["in a call"] += killed and in_call
            told["whole"] += killed and is_whole
            told["commits"] += (label - before) // 2
            told["half made"] += label > returned
            if label >= STEPS - 2:
                told["finished"] += 1
                folder = Path(scratch) / str(told["finished"])
    print(json.dumps(told))


if __name__ == "__main__":
    main()
