"""`STALLOC=1 python train.py`: what the installed hook runs when Python starts (see hook.py).

Contract: nothing is loaded and no device is touched until the program first uses CUDA through torch or CuPy, so
programs that never do are left alone; whatever goes wrong here costs one sentence on standard error, never the
program.

STALLOC_DEVICE is "auto" (the default: real GPUs, nothing without one) or "virtual", with ":" and a GPU or an amount
of memory if need be, "2x" before it for two of them. STALLOC_STREAMS is "separate" (the default) or "share",
STALLOC_ARENA "pages" (the default) or "pool". STALLOC_CACHE names the folder of plans, or is "off". STALLOC_REPORT
names a file for the figures of the run as JSON; "{pid}" and "{rank}" in it are replaced. STALLOC_RECORD names the
folder of the flight recorder, which runs without STALLOC=1 too. STALLOC_GUARD, which the pytest plugin sets, names the
folder where a child process leaves a trace of what it allocated.
"""

import atexit
import os
import sys
from _thread import RLock
from collections.abc import Callable

from stalloc.errors import BadInputError, StallocError
from stalloc.imports import after_import, await_use, before_import
from stalloc.integrations.installation import current, installation
from stalloc.notices import say

TYPE_CHECKING = False
if TYPE_CHECKING:  # what this file loads holds up every start of Python: each function imports what it needs
    from typing import Any

    from stalloc.device import VirtualGPU

_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_RECORDERS = (  # each with the function that begins it, of a folder
    ("STALLOC_GUARD", "stalloc.integrations.native_history", "follow_child"),
    ("STALLOC_RECORD", "stalloc.integrations.flight_record", "flight_recorder"),
)
_STREAMS, _ARENAS = ("separate", "share"), ("pages", "pool")
_lock = RLock()


def _contained(
    action: Callable[..., None], *arguments: "Any", so: str = " The program goes on without stalloc."
) -> None:
    """Call `action`; what goes wrong in it is one sentence, since this runs inside other people's imports and calls."""
    try:
        action(*arguments)
    except Exception as error:
        named = "" if isinstance(error, StallocError) else f"{type(error).__name__}: "
        say(f"{named}{str(error).rstrip('.')}.{so}")


def arm() -> None:
    """Get ready to serve this process as soon as it uses CUDA. Never raises."""
    if installation.is_armed:
        return  # Python reads the hook once for each name of a folder
    installation.is_armed = True
    _contained(_arm)


def _arm() -> None:
    wanted = os.environ.get("STALLOC", "0")
    is_on = wanted.lower() not in _OFF
    if is_on and wanted.lower() not in _ON:
        raise BadInputError(f"STALLOC is {wanted[:40]!r}: set it to 1 to switch stalloc on, unset it to switch it off.")
    recorders = [one for one in _RECORDERS if os.environ.get(one[0], "") not in _OFF]
    kind, gpu = chosen_device(os.environ.get("STALLOC_DEVICE", "auto"))
    if is_on:
        _chosen("STALLOC_STREAMS", _STREAMS)
        _chosen("STALLOC_ARENA", _ARENAS)
    is_virtual = kind == "virtual" and (is_on or os.environ.get("STALLOC_GUARD", "") not in _OFF)

    def at_import() -> None:
        if is_virtual:
            _contained(_activate_virtual, gpu, is_on)
        for one in recorders:
            _contained(_record, *one)

    if is_virtual or recorders:
        before_import(("torch", "cupy", "cupy_backends"), at_import)
    if is_on and not is_virtual:
        at_first_use(lambda: _contained(_install_with_cache, kind))


def _record(variable: str, module: str, begin: str) -> None:
    import importlib

    getattr(importlib.import_module(module), begin)(os.environ[variable])


def chosen_device(text: str, option: str = "STALLOC_DEVICE") -> "tuple[str, VirtualGPU | None]":
    """What STALLOC_DEVICE says, or an option of its meaning: the kind of device and the virtual GPU of "virtual:NAME".

    Raises BadInputError for anything else.
    """
    kind, _, which = text.partition(":")
    if kind not in ("auto", "cuda", "virtual") or (which and kind != "virtual"):
        raise BadInputError(f"{option} is {text[:40]!r}: set it to auto, virtual or virtual:A100-80GB.")
    if not which:
        return kind, None
    import dataclasses
    import re

    from stalloc.device import VirtualGPU, find_gpu, parse_memory

    several = re.fullmatch(r"([0-9]{1,9})x(.+)", which)
    count, which = (int(several[1]), several[2]) if several else (1, which)
    is_size = which[0].isdigit()
    gpu = VirtualGPU(name=f"virtual GPU of {which}", total_bytes=parse_memory(which)) if is_size else find_gpu(which)
    return kind, dataclasses.replace(gpu, num_devices=count)


def _chosen(variable: str, choices: tuple[str, str]) -> "Any":
    """What a variable says, by default the first. Raises BadInputError for anything but one of the choices."""
    name = os.environ.get(variable, choices[0])
    if name not in choices:
        raise BadInputError(f"{variable} is {name[:40]!r}: set it to {' or '.join(choices)}.")
    return name


def _activate_virtual(gpu: "VirtualGPU | None", is_on: bool) -> None:
    from stalloc import device

    device.activate("virtual", gpu)
    if is_on:  # only now: the virtual GPU looks for imports too, and these come before
        at_first_use(lambda: _contained(_install_with_cache, "virtual"))


def at_first_use(start: "Callable[[], object]", *, cupy: bool = True) -> None:
    """Have `start` be called once, just before the program first uses CUDA through torch or CuPy, or by `start_now`."""
    installation.start = start
    if not installation.is_watching:
        installation.is_watching = True
        after_import("torch", lambda: _contained(_watch_torch))
        if cupy:
            after_import("cupy", lambda: _contained(_watch_cupy))


def _watch_torch() -> None:
    """Install just before torch initialises CUDA, which is the last moment at which it takes an allocator."""
    torch = sys.modules["torch"]

    def watch(name: str) -> None:
        own = getattr(torch._C, name, None)
        if own is None:
            return  # a CPU build

        def install_and_call(*arguments: "Any") -> "Any":
            if getattr(torch._C, name) is install_and_call:
                setattr(torch._C, name, own)
            start_now()
            now = getattr(torch._C, name)  # perhaps stalloc's own
            return (own if now is install_and_call else now)(*arguments)

        setattr(torch._C, name, install_and_call)

    from stalloc.integrations import torch_pools

    torch_pools.answer(torch)  # a program may take them by name before CUDA is initialised
    watch("_cuda_init")
    watch("_cuda_record_memory_history")  # it initialises CUDA by another way
    _watch_pinning(torch.Tensor)


def _watch_pinning(tensor: "Any") -> None:
    """The same before memory is pinned, for which torch initialises its allocator in C++.

    Functions that take pin_memory=True are left as they are: torch.compile and torch.jit know them by identity.
    """
    own = tensor.pin_memory  # of a base class

    def install_and_pin(*arguments: "Any", **more: "Any") -> "Any":
        if vars(tensor).get("pin_memory") is install_and_pin:
            del tensor.pin_memory
        start_now()
        return own(*arguments, **more)

    tensor.pin_memory = install_and_pin


def _watch_cupy() -> None:
    """Install at CuPy's first allocation; who asks for its pool before that gets the one that answers from then on."""
    from stalloc.integrations.cupy_default_pool import hand_out

    if current() is not None:
        return
    cupy: Any = sys.modules["cupy"]
    own = cupy.cuda.get_allocator()

    def install_and_allocate(num_bytes: int) -> "Any":
        start_now()  # a thread that comes meanwhile waits: what CuPy's own pool gave it would stay there
        allocate = cupy.cuda.get_allocator()
        if allocate is install_and_allocate and not installation.is_starting:
            cupy.cuda.set_allocator(own)
        return own(num_bytes) if allocate is install_and_allocate else allocate(num_bytes)

    pool = hand_out(lambda: start_now() if _serve_cupy() else None)
    installation.cupy_allocators = install_and_allocate, own, pool.malloc
    cupy.cuda.set_allocator(install_and_allocate)


def _serve_cupy() -> bool:
    """Whether the program has left CuPy's allocator to us."""
    if not installation.cupy_allocators:
        return True
    from stalloc.integrations.cupy_default_pool import call_outside

    return call_outside(sys.modules["cupy"].cuda.get_allocator) in installation.cupy_allocators


def start_now() -> None:
    """Call what was given to `at_first_use`, unless that was done, or stalloc was installed meanwhile."""
    with _lock:
        if installation.was_started or current() is not None or installation.start is None:
            return
        installation.was_started = installation.is_starting = True
        try:
            installation.start()
        finally:
            installation.is_starting = False


def start_at_first_use(start: "Callable[[bool, bool], object]") -> list[StallocError]:
    """Have `start` install stalloc, for torch and for CuPy if it is told so, once the program uses CUDA or needs it.

    An error of stalloc's ends the program, and is in the list that is returned.
    """
    from stalloc import device

    device.check_cupy()
    errors: list[StallocError] = []

    def start_or_end() -> None:
        try:
            if served := _served_libraries():
                start(*served)
        except StallocError as error:
            errors.append(error)
            raise SystemExit(2) from None

    at_first_use(start_or_end)
    await_use(start_now)
    return errors


def _served_libraries() -> tuple[bool, bool] | None:
    """Whether the program leaves the allocators of torch and CuPy to us; None without a GPU, as both will say."""
    from stalloc.device.nvidia_driver import gpus
    from stalloc.integrations import torch_conf

    if not gpus():
        return None
    torch = sys.modules.get("torch")
    return torch is None or torch_conf.leaves_allocator_to_us(torch), _serve_cupy()


def _install_with_cache(kind: str) -> None:
    from stalloc.integrations import plan_cache, torch_conf
    from stalloc.integrations.installing import install
    from stalloc.runtime import Settings

    served = _served_libraries()
    if served is None:
        return
    serve_torch, serve_cupy = served
    streams = _chosen("STALLOC_STREAMS", _STREAMS)
    cache = plan_cache.of_program(None, streams)
    runtime = install(
        device="virtual" if kind == "virtual" else "cuda",
        torch=serve_torch,
        cupy=serve_cupy,
        settings=Settings(streams=streams, arena=_chosen("STALLOC_ARENA", _ARENAS)),
        known_plans=cache.load() if cache is not None else None,
    )
    if serve_torch and (sentence := torch_conf.report(runtime)):
        say(sentence)
    if cache is not None:
        atexit.register(cache.update, runtime)
    file = os.environ.get("STALLOC_REPORT")
    if file:
        source = "cache" if cache is not None and cache.loaded else None
        atexit.register(_contained, _write_report, runtime, file, source, so="")


def _write_report(runtime: "Any", file: str, plan_source: str | None) -> None:
    if os.getpid() != runtime.pid:
        return  # a child of fork
    import dataclasses
    import json

    from stalloc.files import write_whole

    file = file.replace("{pid}", str(os.getpid())).replace("{rank}", os.environ.get("RANK", "0"))
    reports = [dataclasses.asdict(report) for report in runtime.reports()]
    text = json.dumps({"plan_source": plan_source, "devices": reports}, indent=2) + "\n"
    write_whole(file, text, "name another file in STALLOC_REPORT")
