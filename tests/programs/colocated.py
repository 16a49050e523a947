"""An engine sleeps by tags while a trainer in its process uses what it gave back: what became of both, as JSON.

The virtual GPU has 288 MiB, fewer than both need at once, and keeps the bytes of every copy.
"""

import json
import random
import sys
from functools import partial
from typing import Any

from stalloc import device

device.activate("virtual", device.VirtualGPU(total_bytes=288 << 20, copy_limit_bytes=None))

import torch  # noqa: E402  (the device is in place)
from torch import nn  # noqa: E402

import stalloc  # noqa: E402
from stalloc.device import virtual  # noqa: E402

torch.set_num_threads(1)
NUM_OPERATIONS = int(sys.argv[1])
stalloc.install()
torch.manual_seed(0)
MIB = 1 << 20


def filled(mib: float) -> Any:
    return torch.randn(int(mib * MIB) // 4).to("cuda")


def bytes_of(tensor: Any) -> bytes:
    told: bytes = tensor.detach().cpu().numpy().tobytes()
    return told


def refused(ask: Any) -> str:
    try:
        ask()
    except (RuntimeError, stalloc.StallocError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


weights, cache = [filled(9.3) for _ in range(4)], [filled(20.3) for _ in range(5)]
stalloc.tag("weights", *weights)
stalloc.tag("kv", *cache)
places = [one.data_ptr() for one in (*weights, *cache)]
values = [bytes_of(one) for one in weights]
trainer = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(2)]).cuda()
optimizer = torch.optim.AdamW(trainer.parameters())


def train() -> None:
    optimizer.zero_grad()
    trainer(torch.randn(1000, 2000).cuda()).sum().backward()
    optimizer.step()


def sleep() -> int:
    return stalloc.sleep(tags="kv", to="drop").given_back_bytes + stalloc.sleep(tags="weights").given_back_bytes


told: dict[str, Any] = {"too_much_awake": refused(train)}
optimizer.zero_grad()
optimizer.state.clear()
told["given_back"], told["rounds"], told["phases"] = sleep(), [], []
for _ in range(3):
    for _ in range(6):
        train()
    told["phases"].append(stalloc.statistics()[0].phase)
    optimizer.zero_grad()
    optimizer.state.clear()
    stalloc.wake()
    awake = [one.data_ptr() for one in (*weights, *cache)] == places
    told["rounds"].append(awake and [bytes_of(one) for one in weights] == values)
    for one in cache:
        one.copy_(torch.randn(one.numel()))
    sleep()

train()
train()
gradients = [one.grad for one in trainer.parameters()]  # which have places of the plan
for one in gradients:
    one.copy_(torch.randn(one.shape))
stalloc.tag("gradients", *gradients)
before = [bytes_of(one) for one in gradients]
told["planned_given_back"] = stalloc.sleep(tags="gradients").given_back_bytes
optimizer.zero_grad()
train()
told["phases"].append(stalloc.statistics()[0].phase)
optimizer.zero_grad()
optimizer.state.clear()
stalloc.wake(tags="gradients")
told["planned_whole"] = [bytes_of(one) for one in gradients] == before
del gradients

taken = [filled(30) for _ in range(4)]
told["no_room"] = refused(stalloc.wake)
told["refused_asleep"] = refused(lambda: filled(150))
told["compact"] = refused(lambda: stalloc.compact(trainer))
told["others_go_on"] = refused(lambda: filled(10))
before = [bytes_of(one) for one in taken]
del cache[0]  # what is freed while it sleeps
more = filled(20.3)
told["others_whole"] = [bytes_of(one) for one in taken] == before and more.data_ptr() not in places
del taken, more
stalloc.wake()
told["weights_whole"] = [bytes_of(one) for one in weights] == values
told["after_all"] = refused(lambda: [filled(15.3) for _ in range(4)])
torch.cuda.empty_cache()
told["held_at_end"] = virtual.used_bytes() - torch.cuda.memory_allocated()

rng, wrong = random.Random(56), []
engine = {name: [(one, bytes_of(one)) for one in (filled(rng.uniform(0.001, 9)) for _ in range(4))] for name in "abc"}
for name, tensors in engine.items():
    stalloc.tag(name, *[one for one, _ in tensors])
asleep: set[str] = set()
others: list[Any] = []
del cache, weights
for number in range(NUM_OPERATIONS):
    what = rng.random()
    if what < 0.4:
        refused(lambda: others.append([one := filled(rng.choice([0.001, 0.3, 1, 3, 11])), bytes_of(one)]))
    elif what < 0.7 and others:
        others.pop(rng.randrange(len(others)))
    elif what < 0.8:
        asleep = {name for name in asleep if name != min(asleep) or refused(partial(stalloc.wake, tags=name))}
    elif what < 0.9 and not asleep:
        asleep = {name for name in engine if rng.random() < 0.7}
        for name in asleep:
            stalloc.sleep(tags=name)
    elif what >= 0.9:
        name = rng.choice("abc")
        del engine[name][:1]
        if name not in asleep and not refused(lambda: others.append([one := filled(2), bytes_of(one)])):
            engine[name].append(tuple(others.pop()))
            stalloc.tag(name, engine[name][-1][0])
    alive = [pair for name in engine if name not in asleep for pair in engine[name]]
    wrong += [number for one, kept in (*others, *alive) if bytes_of(one) != kept]
others.clear()
told["last_wake"] = refused(stalloc.wake)
told["wrong"] = wrong + [name for name in engine for one, kept in engine[name] if bytes_of(one) != kept]
print(json.dumps(told))
