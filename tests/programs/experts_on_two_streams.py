"""Experts that are cached on the device are called on two streams in turn; what the order checker found, as JSON."""

import json

from stalloc import device

device.activate("virtual")

import torch  # noqa: E402

import stalloc  # noqa: E402
from stalloc.device import virtual  # noqa: E402

stalloc.install()
experts = [torch.nn.Linear(512, 512, bias=False, device="cuda") for _ in range(3)]
cache = stalloc.cache_experts(experts, room="2MiB")
side = torch.cuda.Stream()
with torch.no_grad():
    for number in (0, 1, 2, 2, 0):
        for stream in (torch.cuda.default_stream(), side):
            with torch.cuda.stream(stream):
                experts[number](torch.ones(1, 512, device="cuda"))
checker = virtual.order_checker()
assert checker is not None
print(json.dumps([one.text for one in checker.found()]))
