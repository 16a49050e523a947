"""Programs that run out of memory, or nearly, each in its own way: what docs/troubleshooting.md looks at.

python symptoms.py fragmented   a large request fails although as much is free, in pieces
python symptoms.py leak         something is kept from every step
python symptoms.py late         what is free is cut up by what lives long: a rare long batch fails after many steps
"""

import collections
import functools
import random
import sys

import torch

MIB = 1 << 20
new = functools.partial(torch.empty, dtype=torch.uint8, device="cuda")


def fragmented() -> None:
    """What is kept lies between what goes; then one request is as large as many of the gaps together."""
    kept, gone = [], []
    for _ in range(160):
        gone.append(new(8 * MIB))
        kept.append(new(2 * MIB))
    gone.clear()
    print(f"allocated {torch.cuda.memory_allocated() / MIB:.0f} MiB")
    logits = new(1024 * MIB)
    print(f"the logits have {logits.nbytes / MIB:.0f} MiB")


def leak() -> None:
    """A mask of every step is kept, for a plot that nobody draws."""
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    masks = []
    for _ in range(12):
        loss = model(torch.ones(2048, 1024, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        masks.append(new(4 * MIB))


def late() -> None:
    """Batches of ever other lengths, a queue of features that outlives many of them, and now and then a long batch."""
    rng = random.Random(1)
    features = collections.deque(maxlen=120)
    for step in range(300):
        activations = []
        for _ in range(40):
            activations.append(new(rng.randrange(2, 10) * MIB))
            if rng.random() < 0.05:
                features.append(new(2 * MIB))
        logits = new((760 if step % 150 == 140 else rng.randrange(100, 300)) * MIB)
        del activations, logits
        if step % 100 == 99:
            print(f"step {step + 1} is done")


if __name__ == "__main__":
    {"fragmented": fragmented, "leak": leak, "late": late}[sys.argv[1]]()
