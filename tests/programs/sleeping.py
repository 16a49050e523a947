"""A job that sleeps between its steps: what became of its addresses, its bytes and the device, as JSON.

The virtual GPU keeps the bytes of every copy here, and its kernels do nothing, so tensors hold what was copied to them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from stalloc import device

device.activate("virtual", device.VirtualGPU(total_bytes=256 << 20, copy_limit_bytes=None))

import cupy  # noqa: E402  (the device is in place)
import torch  # noqa: E402
from torch import nn  # noqa: E402

import stalloc  # noqa: E402
from stalloc.device import virtual  # noqa: E402

torch.set_num_threads(1)
ROUNDS = int(sys.argv[1])
stalloc.install()
torch.manual_seed(0)


def filled(size: int) -> torch.Tensor:
    return torch.randn(size).to("cuda")


def bytes_of(tensors: list[Any]) -> list[bytes]:
    return [one.detach().cpu().numpy().tobytes() for one in tensors]


def refused(ask: Any) -> str:
    try:
        ask()
    except (RuntimeError, MemoryError, stalloc.StallocError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
cache = [filled(1 << 19) for _ in range(3)]
array = cupy.asarray(torch.arange(300_000).numpy())
small = filled(100)
other_job = torch.zeros(0)


def train() -> None:
    optimizer.zero_grad()
    model(torch.randn(64, 256).cuda()).sum().backward()
    optimizer.step()


def infer() -> None:
    with torch.no_grad():
        for length in (64, 128, 64):
            model(torch.randn(length, 256).cuda())


train()
for one in optimizer.state.values():  # kernels do nothing: values that can be told from zeros
    one["exp_avg"].copy_(torch.randn(one["exp_avg"].shape))
tensors = [*model.parameters(), *cache, small, *[one["exp_avg"] for one in optimizer.state.values()]]
addresses, values = [one.data_ptr() for one in tensors], bytes_of(tensors)
array_before = array.data.ptr, array.get().tobytes()
wrong, held, kept = [], [], []
targets = ["host", "host", "disk"]
for number in range(ROUNDS):
    (train if number % 2 else infer)()
    if number == 2:
        freed = filled(3 << 20)
    awake_bytes = virtual.used_bytes()
    slept = stalloc.sleep(to=targets[number % 3])
    held.append(virtual.used_bytes() / awake_bytes)
    kept.append(slept.kept_bytes)
    if number == 2:
        del freed
        torch.cuda.empty_cache()
    stalloc.wake()
    if [one.data_ptr() for one in tensors] != addresses or bytes_of(tensors) != values:
        wrong.append(number)
    if (array.data.ptr, array.get().tobytes()) != array_before:
        wrong.append(number)

told: dict[str, Any] = {"wrong": wrong, "held": max(held), "kept_bytes": min(kept)}
stalloc.sleep(drop=cache)
told["request"] = refused(lambda: torch.zeros(1000, device="cuda"))
told["array"] = refused(lambda: cupy.zeros(1000))
told["twice"] = refused(stalloc.sleep)
told["step"] = refused(stalloc.step)
stalloc.wake()
told["others_whole"] = bytes_of(tensors[:8]) == values[:8] and small.cpu().numpy().tobytes() == values[11]
told["cache_lost"] = bytes_of(cache) != values[8:11]
told["cache_addresses"] = [one.data_ptr() for one in cache] == addresses[8:11]
kept_without = stalloc.sleep(to="drop").kept_bytes
told["dropped_keeps"] = kept_without
stalloc.wake()
told["addresses_after_drop"] = [one.data_ptr() for one in tensors] == addresses
kv, weights = [filled(3 << 20) for _ in range(2)], filled(2 << 20)
stalloc.tag("kv", *kv)
stalloc.tag("weights", weights, optimizer, array)
stalloc.tag("tiny", small)
tagged = [*kv, weights]
places, awake_bytes = [one.data_ptr() for one in tagged], virtual.used_bytes()
told["tiny_given_back"] = stalloc.sleep(tags="tiny").given_back_bytes
told["after_nothing"] = refused(lambda: torch.zeros(1000, device="cuda"))
part = stalloc.sleep(tags="kv", to="drop")
told["kv"] = [part.given_back_bytes, part.kept_bytes, awake_bytes - virtual.used_bytes()]
others = bytes_of([weights, *cache])
weights.copy_(torch.randn(2 << 20))  # what is awake goes on
updated = bytes_of([weights])
told["rest_computes"] = updated != others[:1] and bytes_of(cache) == others[1:]
told["unknown_tag"] = refused(lambda: stalloc.sleep(tags=["kv", "cache"]))
told["weights_kept"] = stalloc.sleep(tags=["weights"]).kept_bytes
stalloc.wake(tags="weights")
told["weights_first"] = bytes_of([weights]) == updated and [one.data_ptr() for one in tagged] == places
told["kv_still_asleep"] = awake_bytes - virtual.used_bytes()
stalloc.wake()
for one in kv:
    one.copy_(torch.randn(3 << 20))
everything = bytes_of([*tagged, *tensors])
stalloc.sleep()
stalloc.wake(tags="weights")
told["part_still_asleep"] = refused(lambda: torch.zeros(1000, device="cuda"))
told["weights_of_all"] = bytes_of([weights]) == updated
stalloc.sleep(tags="weights", to="disk")
stalloc.wake()
told["everything_back"] = bytes_of([*tagged, *tensors]) == everything
del kv, weights, tagged
told["no_folder"] = refused(lambda: stalloc.sleep(to="disk", folder=Path("/nonexistent/folder")))
told["no_such_place"] = refused(lambda: stalloc.sleep(to="cloud"))
stalloc.sleep()
size = 250 << 20
taken = cupy.cuda.runtime.malloc(size)  # another job has the device
told["no_room"] = refused(stalloc.wake)
told["still_asleep"] = refused(lambda: torch.zeros(1000, device="cuda"))
cupy.cuda.runtime.free(taken)
stalloc.wake()
train()
told["phase"] = stalloc.statistics()[0].phase
print(json.dumps(told))
