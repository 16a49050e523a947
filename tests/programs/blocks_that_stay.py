"""Blocks that save nothing that could be recomputed, each for a reason of its own: prints what is said of them."""

import json

from stalloc import device
from stalloc.device.known_gpus import DEFAULT_GPU

device.activate("virtual", DEFAULT_GPU)

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from stalloc.cost.gpu_rates import rates_of  # noqa: E402
from stalloc.fitting.observation import ProgramSeen  # noqa: E402
from stalloc.fitting.observer import Observer  # noqa: E402


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.conv(x)


class Averaged(Convolved):
    def forward(self, x):
        with torch.no_grad():
            x.mean()
        return self.conv(x)


class Frozen(Convolved):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class Within(Convolved):
    reentrant = False

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=self.reentrant)

    def compute(self, x):
        return self.conv(torch.tanh(self.conv(x)))


class WithinReentrant(Within):
    reentrant = True


class Around(Convolved):
    def forward(self, x):
        return self.conv(torch.tanh(self.conv(x)))


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.ParameterList([nn.Parameter(torch.zeros(8, 1, 1))])

    def forward(self, x):
        return x + self.part[0]


class Plain(Around):
    pass


class Idle(Around):
    pass


KINDS = (Frozen, Convolved, Averaged, Within, WithinReentrant, Around, Shifted, Plain)


class Model(nn.Module):
    def __init__(self, *kinds):
        super().__init__()
        self.parts = nn.ModuleList([kind() for kind in kinds for _ in range(2)])

    def forward(self, x):
        for part in self.parts:
            if type(part) is Around:
                x = checkpoint(part, x, use_reentrant=False)
            else:
                with torch.set_grad_enabled(type(part) is not Idle):
                    x = part(x)
        return x.square().sum()


def seen(*kinds):
    observer = Observer(rates_of("NVIDIA H100 80GB HBM3"))
    model, weight = Model(*kinds).cuda(), torch.ones(1, device="cuda", requires_grad=True)
    for _ in range(3):
        (model(torch.ones(2, 8, 9, 9, device="cuda")) * weight).backward()
        observer.step_ended()
    return ProgramSeen.from_json(observer.seen())


print(json.dumps([{one.kind: one.why_not for one in seen(*KINDS).blocks}, seen(Idle).why_no_blocks]))
