"""Programs that only allocate, each of which leaves recordings: python blocks.py NAME FOLDER, on a virtual GPU."""

import collections
import contextlib
import functools
import random
import sys
from pathlib import Path

import torch
from recorder import MIB, Recorder

new = functools.partial(torch.empty, dtype=torch.uint8, device="cuda")


def fragmented(recorder: Recorder) -> None:
    """Batches of ever other lengths, and features that outlive many of them."""
    rng = random.Random(1)
    recorder.begin()
    features: collections.deque[torch.Tensor] = collections.deque(maxlen=40)
    for _ in range(30):
        activations = []
        for _ in range(20):
            activations.append(new(rng.randrange(8, 80) * MIB))
            if rng.random() < 0.1:
                features.append(new(rng.randrange(4, 12) * MIB))
        logits = new(rng.randrange(200, 900) * MIB)
        del activations, logits
    recorder.save("fragmented")


def leak(recorder: Recorder) -> None:
    """A mask of every step is kept."""
    recorder.begin()
    weights = [new(16 * MIB) for _ in range(4)]
    masks = []
    for _ in range(12):
        activations = [new(32 * MIB) for _ in weights]
        masks.append(new(4 * MIB))
        del activations
    recorder.save("leak")


def streams(recorder: Recorder) -> None:
    """Activations are copied away on six streams while others are made: their memory waits for the copies."""
    recorder.begin()
    copies = [torch.cuda.Stream() for _ in range(6)]
    for _ in range(8):
        away = []
        for number, stream in enumerate(copies):
            activation = new((8 + 2 * number) * MIB)
            with torch.cuda.stream(stream):
                away.append(new(activation.nbytes // 2))
            activation.record_stream(stream)
            del activation
        del away
        torch.cuda.synchronize()
    recorder.save("streams")


def gpus(recorder: Recorder) -> None:
    """Three GPUs in one process, in pages of expandable segments; the second one runs out, and the others go on."""
    recorder.begin()
    kept: list[torch.Tensor] = []
    for number in range(40):
        for device, size in enumerate((24, 40, 16)):
            with torch.cuda.device(device), contextlib.suppress(torch.OutOfMemoryError):
                gone = new((size + number % 5) * MIB)
                if number % (4 - device) == 0:
                    kept.append(new(size * MIB))
                del gone
    recorder.save("gpus")


def stale_cache(recorder: Recorder) -> None:
    """What an evaluation left in the cache is given back after the recording began."""
    large = [new(300 * MIB) for _ in range(4)]
    del large
    recorder.begin()
    torch.cuda.empty_cache()
    kept = []
    for number in range(60):
        kept.append(new((2 + number % 7) * MIB))
        gone = new(20 * MIB)
        del gone
    recorder.save("stale_cache")


def no_history(recorder: Recorder) -> None:
    """Nothing was recorded, and a snapshot still tells what is held; then one free is."""
    kept = [new(size * MIB) for size in (600, 24, 2048, 8, 28)]
    del kept[2]
    recorder.save("no_history")
    torch.cuda.memory._record_memory_history(stacks="python")
    kept.pop()
    recorder.save("one_event")


if __name__ == "__main__":
    globals()[sys.argv[1]](Recorder(Path(sys.argv[2])))
