"""Optimizers with and without paged state: prints what became of each as JSON.

On the processor, where everything computes, parameters and states of six steps are compared bit by bit. On the virtual
GPU, whose copies are all real here and whose kernels do nothing, state has to come back as it was loaded.
"""

import copy
import gc
import io
import json
import pickle
import resource
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from stalloc import device

device.activate("virtual", device.VirtualGPU(total_bytes=1 << 30, copy_limit_bytes=None))

import torch  # noqa: E402  (the device is in place)
from equality import same  # noqa: E402  (beside this file)
from refusals import sentence  # noqa: E402
from torch import nn  # noqa: E402

import stalloc  # noqa: E402
from stalloc.techniques.applying import apply_settings  # noqa: E402
from stalloc.techniques.host_store import held_bytes  # noqa: E402
from stalloc.techniques.technique_settings import TechniqueSettings, TierSettings  # noqa: E402

torch.set_num_threads(1)
WIDTH, STEPS = 48, 6
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": group, "lr": rate} for group, rate in zip(halves(list(p)), (1e-3, 1e-2), strict=True)]
    ),
}


def halves(parameters: list[Any]) -> tuple[list[Any], list[Any]]:
    return parameters[::2], parameters[1::2]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def train(make: Make, *, paged: bool, **where: Any) -> tuple[list[torch.Tensor], dict[str, Any], int]:
    """Parameters, state and the bytes of the host, after steps with most of what people do around them."""
    net = model()
    optimizer = make(net.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    paging = stalloc.page_optimizer(optimizer, window=40_000, **where) if paged else None
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            scaler.scale(net(torch.randn(4, WIDTH)).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        if step == 1:
            net[0].weight.grad = None  # a parameter that has none in this step
        if step == 2:
            losses = [net(torch.ones(1, WIDTH)).sum().item()]
            losses.append(optimizer.step(lambda: net(torch.ones(1, WIDTH)).sum()).item())
            assert losses[0] == losses[1], "the closure is called before the update"
        else:
            scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if step == 3:  # saved and resumed
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert calls == ["before", "after"] * STEPS
    host_bytes = paging.store.peak_bytes if paging else 0
    return [one.detach() for one in net.parameters()], copy.deepcopy(optimizer.state_dict()), host_bytes


@cache
def alone(name: str) -> tuple[list[torch.Tensor], dict[str, Any], int]:
    """The same of an optimizer that is not paged."""
    return train(OPTIMIZERS[name], paged=False)


def refused(optimizer: Any) -> str:
    try:
        stalloc.page_optimizer(optimizer)
    except stalloc.BadInputError as error:
        return str(error)
    return ""


class Strange(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def refusals() -> dict[str, str]:
    parameters = list(model().parameters())
    scheduled = torch.optim.Adamax(parameters)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    return {
        "LBFGS": refused(torch.optim.LBFGS(parameters)),
        "own": refused(Strange(parameters)),
        "capturable": refused(torch.optim.Adam(parameters, capturable=True)),
        "several precisions": refused(torch.optim.Adafactor([parameters[0], nn.Parameter(parameters[1].bfloat16())])),
        "model": refused(model()),
    }


def farthest(one: Any, other: Any) -> float:
    """The largest difference of two lists of tensors, as a part of their largest value."""
    pairs = list(zip(one, other, strict=True))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def elsewhere() -> dict[str, Any]:
    """State that the processor updates, that stays on the device, and that lies on disk, in several shares."""
    found: dict[str, Any] = {"on disk": {}, "by the processor": {}}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, make) in enumerate(OPTIMIZERS.items()):
            as_it_is = alone(name)
            on_disk = train(make, paged=True, host=40_000, disk=f"{folder}/{number}:1MiB", device=0.25)
            found["on disk"][name] = same(as_it_is[:2], on_disk[:2])
            if (name.startswith("Adam") and name != "Adamax") or name == "groups":
                shared = train(make, paged=True, processor=0.5, device=0.2)
                found["by the processor"][name] = farthest(shared[0], as_it_is[0])
    all_fused = train(OPTIMIZERS["AdamW fused"], paged=True, processor=1.0)
    found["in other layouts"] = in_other_layouts()
    found["fused is fused"] = same(alone("AdamW fused")[:2], all_fused[:2])
    short = train(OPTIMIZERS["AdamW fused"], paged=True, processor=1.0, host=100_000)
    found["bounded"] = same(all_fused[:2], short[:2]) and all_fused[2] > 100_000 >= short[2] > 0
    return found


def in_other_layouts() -> float:
    """Parameters, gradients and state whose numbers lie in other orders: by the processor, against as it is."""
    found = []
    for processor in (0.0, 1.0):
        torch.manual_seed(6)
        parameters = [
            nn.Parameter(torch.randn(8, 4, 16, 16).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn(64, 80).t()),
        ]

        def made(parameters: Any = parameters, share: float = processor) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(parameters)
            if share:
                stalloc.page_optimizer(optimizer, processor=share)
            return optimizer

        optimizer = made()
        for step in range(4):
            for one in parameters:
                one.grad = torch.randn(one.shape)
            optimizer.step()
            if step == 1:  # resumed from state in the usual order
                state = copy.deepcopy(optimizer.state_dict())
                for values in state["state"].values():
                    values |= {name: values[name].contiguous() for name in ("exp_avg", "exp_avg_sq")}
                optimizer = made()
                optimizer.load_state_dict(state)
        found.append([one.detach() for one in parameters])
    return farthest(*found)


def by_the_processor() -> dict[str, Any]:
    """Parameters on a device whose copies are real: the processor's updates are what AdamW gives on the processor."""
    torch.manual_seed(5)
    begun = [torch.randn(300, 100) for _ in range(5)]
    gradients = [[torch.randn(300, 100) for _ in begun] for _ in range(3)]
    here = [nn.Parameter(one.clone()) for one in begun]
    there = [nn.Parameter(one.to("cuda")) for one in begun]
    wanted, optimizer = torch.optim.AdamW(here, fused=True), torch.optim.AdamW(there, fused=True)
    paging = stalloc.page_optimizer(optimizer, processor=1.0)
    more = []
    for step in gradients:
        for parameters, one in ((here, wanted), (there, optimizer)):
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.to(parameter.device)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            one.step()
            more.append(torch.cuda.max_memory_allocated() - before)
            for parameter in parameters:  # as a program may, between steps
                parameter.data.copy_(parameter.data.cpu() * 0.5)
    there_now = [one.detach().cpu() for one in there]
    state = optimizer.state_dict()["state"]
    found = {
        "equal": same(there_now, [one.detach() for one in here]) or farthest(there_now, here),
        "state": same([one["exp_avg"] for one in state.values()], [one["exp_avg"] for one in wanted.state.values()]),
        "more": max(more),
    }
    paging.undo(optimizer)
    found["undone"] = {value.device.type for one in optimizer.state.values() for value in one.values()} == {"cuda"}
    return found


def commits() -> dict[str, Any]:
    """What was committed, after more steps and in another optimizer; and what is refused."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        where = f"{folder}/run"
        parameters = [nn.Parameter(torch.randn(64, 64)) for _ in range(4)]
        optimizer = torch.optim.AdamW(parameters)
        stalloc.page_optimizer(optimizer, host="80KiB", disk=f"{where}:1MiB")

        def step() -> None:
            for one in parameters:
                one.grad = torch.randn(64, 64)
            optimizer.step()

        step()
        stalloc.commit(optimizer, 1)
        step()
        at_two = copy.deepcopy(optimizer.state_dict())
        stalloc.commit(optimizer, 2)
        step()
        label, state = stalloc.committed(where)
        found["committed"] = label == 2 and same(state, at_two)
        other = torch.optim.AdamW(parameters)
        found["locked"] = sentence(lambda: stalloc.page_optimizer(other, disk=f"{where}:1MiB"))
        stalloc.page_optimizer(other, host="64KiB", disk=f"{folder}/other:40KiB")
        other.load_state_dict(state)
        found["loaded"] = same(other.state_dict(), at_two)
        found["no room for two"] = sentence(lambda: stalloc.commit(other, 3))
        found["nothing on disk"] = sentence(lambda: stalloc.commit(torch.optim.AdamW(parameters), 3))
        found["nothing committed"] = sentence(lambda: stalloc.committed(folder)).replace(folder, "FOLDER")
        found["no size"] = sentence(lambda: stalloc.page_optimizer(other, disk=folder)).replace(folder, "FOLDER")
        (file,) = Path(where).glob("state-*.bin")
        damage(file)
        found["damaged"] = sentence(lambda: stalloc.committed(where)).replace(where, "FOLDER")
        found["misread"] = sentence(step).replace(where, "FOLDER")
        found["locked"] = found["locked"].replace(where, "FOLDER")
        found |= lost_and_full(folder)
    return found


def damage(file: Path) -> None:
    with file.open("r+b") as damaged:
        for place in range(0, file.stat().st_size, 4096):
            damaged.seek(place)
            damaged.write(b"damage")


def lost_and_full(folder: str) -> dict[str, Any]:
    """A folder that is deleted, and a disk that has no room, which a limit of the process stands for."""
    found: dict[str, Any] = {}
    parameter = nn.Parameter(torch.randn(64, 64))

    def stepped(where: str) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW([parameter])
        stalloc.page_optimizer(optimizer, host="64KiB", disk=f"{where}:1MiB")
        parameter.grad = torch.ones(64, 64)
        optimizer.step()
        return optimizer

    lost = stepped(f"{folder}/lost")
    shutil.rmtree(f"{folder}/lost")
    lost.step()
    found["lost"] = sentence(lambda: stalloc.commit(lost, 1)).replace(folder, "FOLDER")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    full = stepped(f"{folder}/full")
    full.step()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found["full"] = full.state[parameter]["step"].item()
    return found


def with_disk() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return on_the_device(host="4MiB", disk=f"{folder}:64MiB")


def on_the_device(**where: Any) -> dict[str, Any]:
    """State that is loaded, stepped with, saved and copied, on a device that keeps the bytes of every copy."""
    gc.collect()  # what an earlier one left
    size = 1 << 18
    parameters = [nn.Parameter(torch.zeros(size, device="cuda")) for _ in range(6)]
    optimizer = torch.optim.AdamW(parameters)
    state_bytes = 2 * len(parameters) * 4 * size
    values = {at: {"step": torch.tensor(7.0), "exp_avg": torch.randn(size), "exp_avg_sq": torch.rand(size)}
              for at in range(len(parameters))}  # fmt: skip
    saved = {**optimizer.state_dict(), "state": values}
    paging = stalloc.page_optimizer(optimizer, window="4MiB", **where)
    before = torch.cuda.memory_allocated()
    optimizer.load_state_dict(saved)
    found: dict[str, Any] = {"loaded_bytes": torch.cuda.memory_allocated() - before}
    for one in parameters:
        one.grad = torch.zeros_like(one)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    peaks = []
    for _ in range(3):
        optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()
    found |= {"peaks": peaks, "left_bytes": torch.cuda.memory_allocated() - before, "state_bytes": state_bytes}
    wanted = {at: {**one, "step": torch.tensor(10.0)} for at, one in values.items()}
    found["as_loaded"] = same(optimizer.state_dict()["state"], wanted)
    found["host_bytes"] = paging.store.used_bytes
    found |= paging.told()
    copied = pickle.loads(pickle.dumps(optimizer))
    kinds = {one["exp_avg"].device.type for one in copied.state.values()}
    found["copied"] = kinds == {"cuda"} and same(
        [one["exp_avg"].cpu() for one in copied.state.values()], [one["exp_avg"] for one in wanted.values()]
    )
    paging.undo(optimizer)
    state = list(optimizer.state.values())
    found["undone"] = [one["exp_avg"].device.type for one in state] == ["cuda"] * 6 and same(
        [one["exp_avg_sq"].cpu() for one in state], [one["exp_avg_sq"] for one in wanted.values()]
    )
    del state, copied
    found["host_bytes_undone"] = paging.store.used_bytes
    return found


def layers_on_disk() -> dict[str, Any]:
    """Parameters of a device that keeps the bytes of every copy, in a file between passes, and changed there."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]).requires_grad_(False)
    wanted = [one.detach().clone() for one in model.parameters()]
    model.cuda()(torch.ones(1, 256, device="cuda"))  # which makes workspace of its own
    layer_bytes = 4 * 256 * 257
    before, in_host = torch.cuda.memory_allocated(), held_bytes()
    with tempfile.TemporaryDirectory() as folder:
        streaming = stalloc.stream_layers(model, window=1, host="300KiB", disk=f"{folder}:4MiB")
        found: dict[str, Any] = {
            "away": before - torch.cuda.memory_allocated() == 4 * layer_bytes,
            "host": held_bytes() - in_host,
            "on disk": sum(layer.is_on_disk for layer in streaming.layers),
        }
        torch.cuda.reset_peak_memory_stats()
        for number in range(3):
            model(torch.ones(1, 256, device="cuda"))
            for one, value in zip(model.parameters(), wanted, strict=True):
                if number == 1:  # by a way that autograd does not see
                    one.data.add_(1)
                    value.add_(1)
        found["most"] = torch.cuda.max_memory_allocated() - (before - 4 * layer_bytes)
        found["read"] = same([one.detach().clone() for one in model.parameters()], wanted)
        streaming.undo()
    found["undone"] = same([one.detach().cpu() for one in model.parameters()], wanted)
    return found


def remade() -> dict[str, list[int]]:
    """Bytes in the host and on disk before and after the program drops an optimizer, while nobody looks for cycles."""
    parameters = [nn.Parameter(torch.randn(64, 64)) for _ in range(4)]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, dict[str, Any]] = {
            "host": {},
            "processor": {"processor": 1.0},
            "disk": {"host": "48KiB", "disk": f"{folder}:1MiB"},
        }
        for name, where in ways.items():
            optimizer = torch.optim.AdamW(parameters)
            paging = stalloc.page_optimizer(optimizer, **where)
            for one in parameters:
                one.grad = torch.randn(64, 64)
            optimizer.step()
            used = [paging.store, *([paging.disk.room] if paging.disk is not None else [])]
            found[name] = [one.used_bytes for one in used]
            gc.disable()
            del optimizer, paging
            found[name] += [one.used_bytes for one in used]
            gc.enable()
    return found


def in_turn() -> list[torch.Tensor]:
    """A program that makes another optimizer in mid-training, and gives it the parameters of its last layer later."""
    net = model()
    first, last = net[:3].parameters(), net[3].parameters()

    def train(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()

    train(optimizer := torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9))
    train(optimizer := torch.optim.AdamW(first))
    optimizer.add_param_group({"params": last, "lr": 1e-2})
    train(optimizer)
    return [one.detach() for one in net.parameters()]


def made_again() -> dict[str, Any]:
    """The same under the settings of a run with little host memory and a disk, which the process has from here on."""
    as_it_is = in_turn()
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        tiers = TierSettings(host_bytes=48 << 10, disk_bytes=1 << 20, paged_window_bytes=1)
        in_host = apply_settings(TechniqueSettings(tiers=tiers), said.append, folder=Path(folder))
        is_same = same(in_turn(), as_it_is)
        gc.collect()
    return {"equal": is_same, "said": said, **in_host.told()}


def main() -> None:
    equal = {}
    host: dict[str, int] = {}
    for name, make in OPTIMIZERS.items():
        as_it_is = alone(name)
        with_pages = train(make, paged=True)
        equal[name] = same(as_it_is[:2], with_pages[:2])
        host[name] = with_pages[2]
    bounded = train(OPTIMIZERS["AdamW"], paged=True, host=40_000)
    told = {
        "equal": equal,
        "host": host,
        "bounded": {"equal": same(alone("AdamW")[:2], bounded[:2]), "bytes": bounded[2]},
        "refused": refusals(),
        "device": on_the_device(host="64MiB"),
        "device and disk": with_disk(),
        "elsewhere": elsewhere(),
        "processor": by_the_processor(),
        "commits": commits(),
        "layers on disk": layers_on_disk(),
        "remade": remade(),
        "made again": made_again(),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
